"""Typed messages between processes, the sockets that carry them, and values that both ends know."""
