"""Execution: the device's thread and its passes, draws, the tasks of requests, loading of checkpoints."""
