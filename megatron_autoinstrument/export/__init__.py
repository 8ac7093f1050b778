"""How what was recorded leaves the process."""
