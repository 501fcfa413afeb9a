"""KV heads and layers at a helper: another instance has their KVCache, and computes with it."""
