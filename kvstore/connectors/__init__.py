"""Engines of others on the KVCache pool."""
