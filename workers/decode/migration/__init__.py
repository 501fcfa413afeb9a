"""Moves between decode instances: migrations of running requests, and modules that a helper has."""
