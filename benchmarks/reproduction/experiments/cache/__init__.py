"""Experiments about the pool: hits by capacity and policy, the gain by hits, and the use of memory."""
