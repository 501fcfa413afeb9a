"""Moves of running requests between decode instances: a rule for each reason, and the limits of how often."""
