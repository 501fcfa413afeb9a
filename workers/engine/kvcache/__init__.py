"""The device's paged KVCache: which pages are free, their memory, and the parts that a helper has."""
