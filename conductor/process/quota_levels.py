"""The tokens that tenants have left, in what outlives the process: a file of this host, or etcd.

They are written every few seconds, so what a tenant has used just before a kill is lost: a few seconds of its
requests. Stored times are seconds since 1970.

Owns: what is stored of a tenant's tokens, when. Does not know: who is charged what
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
"""Time between two writes."""
_FORGET_FULL = """
DELETE FROM tenant_tokens WHERE num_left + (? - at) * tokens_per_minute / 60 >= tokens_per_minute
"""
_FOLDER = "tenant_tokens"


class Level(NamedTuple):
    """The tokens that a tenant had left `at` a time."""

    tenant: str
    tokens_per_minute: float
    num_left: float
    at: float

    def is_full(self, now: float) -> bool:
        """Whether the tenant has a whole minute's tokens again."""
        return self.num_left + (now - self.at) * self.tokens_per_minute / 60 >= self.tokens_per_minute


class LevelStore(Protocol):
    """The stored levels of all tenants."""

    async def load(self) -> list[Level]:
        """Return the levels of tenants that have less than a whole minute's tokens. Raises ConfigError."""

    async def save(self, levels: Sequence[Level]) -> None:
        """Store levels, beside those of other tenants. Raises NotStoredError."""


class LevelFile:
    """The levels in a file with the table `SCHEMA`."""

    def __init__(self, file: StateFile) -> None:
        self._file = file

    async def load(self) -> list[Level]:
        """Raises ConfigError if the file is damaged."""
        self._file.clean(_FORGET_FULL, (time.time(),))
        return [Level(*row) for row in self._file.read("SELECT * FROM tenant_tokens")]

    async def save(self, levels: Sequence[Level]) -> None:
        """Store levels, and forget those that are full."""
        write = "INSERT OR REPLACE INTO tenant_tokens VALUES (?, ?, ?, ?)"
        await self._file.write((_FORGET_FULL, (time.time(),)), *((write, level) for level in levels))


class LevelKeys:
    """The levels in etcd, all in one key."""

    def __init__(self, keys: StateKeys) -> None:
        self._keys = keys
        self._levels: dict[str, Level] = {}

    async def load(self) -> list[Level]:
        """Waits until etcd answers. Levels that this release does not understand are full ones."""
        for value in (await self._keys.read(_FOLDER, 1)).values():
            with contextlib.suppress(msgspec.MsgspecError):
                self._levels |= {
                    level.tenant: level for level in msgspec.json.decode(value, type=list[Level])
                }
        return self._not_full()

    async def save(self, levels: Sequence[Level]) -> None:
        """Store levels, and forget those that are full."""
        self._levels |= {level.tenant: level for level in levels}
        not_full = self._not_full()
        async with self._keys.turn():
            await self._keys.change({f"{_FOLDER}/all": msgspec.json.encode(not_full)})
        self._levels = {level.tenant: level for level in not_full}

    def _not_full(self) -> list[Level]:
        now = time.time()
        return [level for level in self._levels.values() if not level.is_full(now)]


class QuotaLevels:
    """Restores the tokens of a Conductor's quotas, and saves them, while `run` runs."""

    def __init__(self, store: LevelStore, quotas: Quotas) -> None:
        self._store, self._quotas = store, quotas
        self._num_saved: dict[str, int] = {}
        """Tokens that each tenant had used at the latest write: charged, and not refunded."""

    async def restore(self) -> None:
        """Restore what was saved. Raises ConfigError."""
        since_1970_s = time.time() - time.monotonic()
        for level in await self._store.load():
            at_s = min(level.at - since_1970_s, time.monotonic())
            self._quotas.restore(level.tenant, TokenBudget(level.tokens_per_minute, level.num_left, at_s))

    async def run(self) -> None:
        """Restore, and save what has changed, now and then, until cancelled. Raises ConfigError."""
        await self.restore()
        while True:
            await asyncio.sleep(SAVE_S)
            with contextlib.suppress(NotStoredError):  # logged, and tried again
                await self.save()

    async def save(self) -> None:
        """Save the tokens of tenants that have used others since the latest write. Raises NotStoredError."""
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
                levels.append(Level(tenant, tokens.tokens_per_minute, tokens.num_left, at))
            await self._store.save(levels)
            self._num_saved |= changed
