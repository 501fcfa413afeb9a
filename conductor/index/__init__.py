"""The prefix index: which instances hold which KVCache blocks, by the events of their pools."""
