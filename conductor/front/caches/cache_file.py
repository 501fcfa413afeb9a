"""Context caches in the file that outlives the process.

Owns: the table of caches. Does not know: who may see a cache, where its blocks are, how files are written
(`mooncake.node.state_file`).
"""

import asyncio
import sqlite3
import time
import zlib
from array import array

from conductor.front.caches.cache_store import StoredCache
from mooncake.node.state_file import Row, StateFile

SCHEMA = """
CREATE TABLE context_caches (
    id TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL, -- of the model
    name TEXT,
    owner TEXT NOT NULL,       -- digest of the API key, empty without keys
    key_name TEXT NOT NULL,
    token_ids BLOB NOT NULL,   -- uint32, native byte order
    chat_prefix BLOB,          -- messages and tools in JSON
    cache_salt TEXT,
    root_key BLOB NOT NULL,    -- parent of the first block's key
    created_at REAL NOT NULL,  -- seconds since 1970
    expires_at REAL NOT NULL,
    checksum INTEGER NOT NULL  -- CRC-32 of token_ids and chat_prefix
) STRICT
"""
_FORGET_EXPIRED = "DELETE FROM context_caches WHERE expires_at <= ?"


_TOKEN_IDS = StoredCache._fields.index("token_ids")


class CacheFile:
    """A `CacheStore` that keeps a cluster's context caches in a file with the table `SCHEMA`."""

    def __init__(self, file: StateFile) -> None:
        self._file = file

    async def load(self, fingerprint: str) -> list[StoredCache]:
        """Remove the expired caches of all models, and return the other caches of this model, oldest first.

        Raises ConfigError if the file is damaged.
        """
        return await asyncio.to_thread(self._load, fingerprint)

    def _load(self, fingerprint: str) -> list[StoredCache]:
        now = time.time()
        self._file.clean(_FORGET_EXPIRED, (now,))
        rows = self._file.read(
            "SELECT * FROM context_caches WHERE fingerprint = ? AND expires_at > ? ORDER BY created_at",
            (fingerprint, now),
        )
        try:
            return [_cache_of(row) for row in rows]
        except sqlite3.Error as error:
            raise self._file.damaged(error) from None

    async def put(self, cache: StoredCache) -> None:
        """Add a cache, or replace the stored cache with its id."""
        row = _row_of(cache)
        places = ", ".join("?" * len(row))
        adding = (f"INSERT OR REPLACE INTO context_caches VALUES ({places})", row)
        await self._file.write((_FORGET_EXPIRED, (time.time(),)), adding)

    async def extend(self, cache: StoredCache) -> None:
        """Store the new time at which a cache expires. The earlier time may have passed already."""
        await self.put(cache)

    async def remove(self, cache_id: str) -> None:
        """Remove a cache. Idempotent."""
        await self._file.write(("DELETE FROM context_caches WHERE id = ?", (cache_id,)))


def _row_of(cache: StoredCache) -> Row:
    data = array("I", cache.token_ids).tobytes()
    checksum = zlib.crc32(cache.chat_prefix or b"", zlib.crc32(data))
    return (*(data if field == "token_ids" else value for field, value in cache._asdict().items()), checksum)


def _cache_of(row: Row) -> StoredCache:
    stored = StoredCache(*row[:-1])
    token_ids = array("I")
    token_ids.frombytes(row[_TOKEN_IDS])
    stored = stored._replace(token_ids=token_ids.tolist())
    if _row_of(stored)[-1] != row[-1]:
        raise sqlite3.DatabaseError(f"the checksum of {stored.id} is wrong")
    return stored
