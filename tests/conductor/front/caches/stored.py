"""Examples of stored context caches."""

import time
from typing import Any

from conductor.front.caches.cache_store import StoredCache

MODEL = "m" * 32


def cache(number: int, ttl_s: float = 600.0, **fields: Any) -> StoredCache:
    stored = StoredCache(
        id=f"cache-{number}",
        fingerprint=MODEL,
        name=f"name-{number}",
        owner="o" * 64,
        key_name="alice",
        token_ids=[number, 1 << 31, 0],
        chat_prefix=b"[[],[]]" if number % 2 else None,
        cache_salt="salt" if number % 3 else None,
        root_key=bytes(range(16)),
        created_at=1000.0 + number,
        expires_at=time.time() + ttl_s,
    )
    return stored._replace(**fields)
