"""Prefill and decode apart or together, and how many instances of each."""
