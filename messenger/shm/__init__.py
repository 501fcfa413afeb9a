"""Shared memory: copies by the sender itself to pages of messengers on the same host."""
