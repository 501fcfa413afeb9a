"""The prefix index: which instances hold which KVCache blocks, as the KV events of their pools say."""
