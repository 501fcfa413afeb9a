"""Prefixes that are kept or copied on purpose: hot ones, and the context caches of clients."""
