"""KV heads at a helper: another instance of the host, which has their KVCache and computes attention."""
