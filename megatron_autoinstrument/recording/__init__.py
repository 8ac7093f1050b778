"""What the training thread does when a call begins and ends: records, nesting, the run, the journal."""
