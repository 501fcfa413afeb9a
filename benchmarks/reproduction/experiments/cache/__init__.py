"""Experiments about the pool: hits by capacity and policy, the worth of hits, and the use of memory."""
