"""Connectors of other engines to the KVCache pool."""
