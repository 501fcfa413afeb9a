"""Shared memory: pages of messengers on the same host, copied by the sender itself."""
