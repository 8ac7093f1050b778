"""What a process is and how it ends: its rank, the store of its job, whether it records, signals."""
