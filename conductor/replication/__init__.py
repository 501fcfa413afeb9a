"""Copies of hot prefixes, copies of leaving instances' blocks, and the context caches of clients."""
