"""The settings: every key with its type and default, read from YAML, environment and flags."""
