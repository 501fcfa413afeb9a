"""Execution: one thread that computes on the device, what was drawn, and from a checkpoint to there."""
