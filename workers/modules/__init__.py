"""KV heads and layers at a helper: another instance of the host has their KVCache, and computes with it."""
