"""Clients of a pool: the library, `mooncake-kv`, and the worker's asyncio client."""
