"""Copies of hot prefixes, and the context caches of clients."""
