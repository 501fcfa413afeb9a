"""The connector's side in vLLM's worker: loads and stores between the engine's pages and the pool."""
