"""Typed messages between processes, and values that both ends know."""
