"""Shared memory: a messenger copies blocks by itself into and out of pages of messengers on the same host."""
