"""What every floor uses: names, groups, registries, and what may leave the process (redaction, finite numbers)."""
