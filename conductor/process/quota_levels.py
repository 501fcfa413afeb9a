"""The levels of tenants' quotas, stored in a file of this host or in etcd, so that they outlive the process.

A level is the number of tokens that a tenant has left. Levels are written every few seconds, so tokens used
in the last seconds before a kill are forgotten. Stored times are seconds since 1970.

Owns: which levels are stored, and when. Does not know: which tenant is charged how much
(`conductor.admission.quotas`).
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from conductor.admission.quotas import Quotas, TokenBudget
from mooncake.errors import NotStoredError
from mooncake.leadership.state_keys import StateKeys
from mooncake.node.state_file import StateFile

SCHEMA = """
CREATE TABLE tenant_tokens (
    tenant TEXT PRIMARY KEY,
    tokens_per_minute REAL NOT NULL,
    num_left REAL NOT NULL,
    at REAL NOT NULL           -- seconds since 1970
) STRICT
"""
SAVE_S = 2.0
"""Seconds between two writes of changed levels."""
_FORGET_FULL = """
DELETE FROM tenant_tokens WHERE num_left + (? - at) * tokens_per_minute / 60 >= tokens_per_minute
"""
_FOLDER = "tenant_tokens"


class QuotaLevel(NamedTuple):
    """The tokens that a tenant had left at the time `at`, in seconds since 1970."""

    tenant: str
    tokens_per_minute: float
    num_left: float
    at: float

    def is_full(self, now: float) -> bool:
        """Return whether the tenant has a full minute's tokens again at the time `now`."""
        return self.num_left + (now - self.at) * self.tokens_per_minute / 60 >= self.tokens_per_minute


class LevelStore(Protocol):
    """The stored levels of all tenants."""

    async def load(self) -> list[QuotaLevel]:
        """Return the levels of tenants that have less than a full minute's tokens.

        Raises ConfigError if the levels cannot be read.
        """

    async def save(self, levels: Sequence[QuotaLevel]) -> None:
        """Store these levels; the levels of other tenants stay. Raises NotStoredError if that fails."""


class LevelFile:
    """The levels in a file with the table `SCHEMA`."""

    def __init__(self, file: StateFile) -> None:
        self._file = file

    async def load(self) -> list[QuotaLevel]:
        """Return the levels in the file that are not full. Raises ConfigError if the file is damaged."""
        self._file.clean(_FORGET_FULL, (time.time(),))
        return [QuotaLevel(*row) for row in self._file.read("SELECT * FROM tenant_tokens")]

    async def save(self, levels: Sequence[QuotaLevel]) -> None:
        """Store these levels, and delete levels that are full by now."""
        write = "INSERT OR REPLACE INTO tenant_tokens VALUES (?, ?, ?, ?)"
        await self._file.write((_FORGET_FULL, (time.time(),)), *((write, level) for level in levels))


class LevelKeys:
    """The levels in etcd, all in one key."""

    def __init__(self, keys: StateKeys) -> None:
        self._keys = keys
        self._levels: dict[str, QuotaLevel] = {}

    async def load(self) -> list[QuotaLevel]:
        """Return the levels in etcd that are not full. Waits until etcd answers.

        Levels that this release cannot decode count as full.
        """
        for value in (await self._keys.read(_FOLDER, 1)).values():
            with contextlib.suppress(msgspec.MsgspecError):
                self._levels |= {
                    level.tenant: level for level in msgspec.json.decode(value, type=list[QuotaLevel])
                }
        return self._not_full()

    async def save(self, levels: Sequence[QuotaLevel]) -> None:
        """Store these levels, and drop levels that are full by now."""
        self._levels |= {level.tenant: level for level in levels}
        not_full = self._not_full()
        async with self._keys.turn():
            await self._keys.change({f"{_FOLDER}/all": msgspec.json.encode(not_full)})
        self._levels = {level.tenant: level for level in not_full}

    def _not_full(self) -> list[QuotaLevel]:
        now = time.time()
        return [level for level in self._levels.values() if not level.is_full(now)]


class QuotaLevels:
    """Restores the levels of a Conductor's quotas, and saves changed levels."""

    def __init__(self, store: LevelStore, quotas: Quotas) -> None:
        self._store, self._quotas = store, quotas
        self._num_saved: dict[str, int] = {}
        """The tokens used as of the latest write, by tenant: charged tokens minus refunded tokens."""

    async def restore(self) -> None:
        """Restore the saved levels. Raises ConfigError if they cannot be read."""
        since_1970_s = time.time() - time.monotonic()
        for level in await self._store.load():
            at_s = min(level.at - since_1970_s, time.monotonic())
            self._quotas.restore(level.tenant, TokenBudget(level.tokens_per_minute, level.num_left, at_s))

    async def run(self) -> None:
        """Restore the levels, then save changed levels every `SAVE_S` seconds until cancelled.

        Raises ConfigError if the saved levels cannot be read.
        """
        await self.restore()
        while True:
            await asyncio.sleep(SAVE_S)
            with contextlib.suppress(NotStoredError):  # logged, and tried again
                await self.save()

    async def save(self) -> None:
        """Save the levels of tenants that have used tokens since the latest write. Raises NotStoredError."""
        since_1970_s = time.time() - time.monotonic()
        used = {
            tenant: tokens.num_charged - tokens.num_refunded
            for tenant, tokens in self._quotas.by_tenant.items()
        }
        changed = {tenant: num for tenant, num in used.items() if num != self._num_saved.get(tenant, 0)}
        if changed:
            levels = []
            for tenant in changed:
                tokens = self._quotas.by_tenant[tenant]
                at = since_1970_s + tokens.at_s
                levels.append(QuotaLevel(tenant, tokens.tokens_per_minute, tokens.num_left, at))
            await self._store.save(levels)
            self._num_saved |= changed
