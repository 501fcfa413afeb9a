"""Context caches in the file that outlives the process.

A cache is in the file before its client is told of it, and stays until it is deleted or its time to live has
passed, whatever becomes of the process. Times in the file are seconds since 1970, as the clock of a process
ends with it.

Owns: the table of caches. Does not know: who may see a cache, where its blocks are, how files are written
(`mooncake.node.state_file`).
"""

import sqlite3
import time
import zlib
from array import array
from typing import NamedTuple

from mooncake.errors import RequestError
from mooncake.messages.blocks import BlockKey
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


class StoredCache(NamedTuple):
    """One context cache, as the file has it. `owner` is the digest of its API key, empty without keys."""

    id: str
    fingerprint: str
    name: str | None
    owner: str
    key_name: str
    token_ids: list[int]
    chat_prefix: bytes | None
    cache_salt: str | None
    root_key: BlockKey
    created_at: float
    expires_at: float


_TOKEN_IDS = StoredCache._fields.index("token_ids")


class CacheFile:
    """The stored context caches of a cluster, in a file with the table `SCHEMA`.

    `put`, `extend` and `remove` are carried out in the order of their calls, and return when the change is on
    disk. If that fails they raise RequestError, and nothing has changed.
    """

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self.num_failures = 0
        """Changes that could not be written."""

    def load(self, fingerprint: str) -> list[StoredCache]:
        """Return the caches of this model, oldest first, and forget those of any model that have expired.

        Raises ConfigError if the file is damaged.
        """
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
        """Add a cache."""
        row = _row_of(cache)
        places = ", ".join("?" * len(row))
        adding = (f"INSERT INTO context_caches VALUES ({places})", row)
        await self._write((_FORGET_EXPIRED, (time.time(),)), adding)

    async def extend(self, cache_id: str, expires_at: float) -> None:
        """Set the end of a cache."""
        await self._write(("UPDATE context_caches SET expires_at = ? WHERE id = ?", (expires_at, cache_id)))

    async def remove(self, cache_id: str) -> None:
        """Remove a cache. Idempotent."""
        await self._write(("DELETE FROM context_caches WHERE id = ?", (cache_id,)))

    async def _write(self, *changes: tuple[str, Row]) -> None:
        try:
            await self._file.write(*changes)
        except sqlite3.Error as error:
            self.num_failures += 1
            raise RequestError(
                f"the server cannot store context caches now: {error}; nothing has changed, try again later",
                status=507,
                code="context_cache_not_stored",
            ) from None


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
