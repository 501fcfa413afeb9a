"""The prefix index: which instances hold which KVCache blocks, according to the KV events of their pools."""
