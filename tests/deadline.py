"""The deadline of tests: the most seconds that a test waits for an event, also on a busy machine."""

DEADLINE_S = 180.0
