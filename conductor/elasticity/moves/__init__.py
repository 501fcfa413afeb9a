"""Moves of running requests between decode instances: a rule for each reason, and limits on their number."""
