"""What the user asks for: variables, flags, `instrument(...)` and OTEL_CONFIG_FILE."""
