"""The tokens that tenants have left, in the file that outlives the process.

They are written every few seconds, so what a tenant has used just before a kill is lost: a few seconds of its
requests. Times in the file are seconds since 1970.

Owns: the table of tokens, when it is written. Does not know: who is charged what
(`conductor.admission.quotas`).
"""

import asyncio
import contextlib
import sqlite3
import time

from conductor.admission.quotas import Quotas, TokenBudget
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


class QuotaLevels:
    """Restores the tokens of a Conductor's quotas, and saves them while `run` runs."""

    def __init__(self, file: StateFile, quotas: Quotas) -> None:
        """Restore. Raises ConfigError if the file is damaged."""
        self._file, self._quotas = file, quotas
        self._num_saved: dict[str, int] = {}
        """Tokens that each tenant had been charged at the latest write."""
        since_1970_s = time.time() - time.monotonic()
        file.clean(_FORGET_FULL, (time.time(),))
        for tenant, per_minute, num_left, at in file.read("SELECT * FROM tenant_tokens"):
            quotas.restore(
                tenant, TokenBudget(per_minute, num_left, min(at - since_1970_s, time.monotonic()))
            )

    async def run(self) -> None:
        """Save what has changed, now and then, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            with contextlib.suppress(sqlite3.Error):  # logged, and tried again
                await self.save()

    async def save(self) -> None:
        """Write the tokens of tenants that were charged since the latest write. Raises sqlite3.Error."""
        since_1970_s = time.time() - time.monotonic()
        changed = {
            tenant: tokens.num_charged
            for tenant, tokens in self._quotas.by_tenant.items()
            if tokens.num_charged != self._num_saved.get(tenant, 0)
        }
        if changed:
            rows = []
            for tenant in changed:
                tokens = self._quotas.by_tenant[tenant]
                rows.append((tenant, tokens.tokens_per_minute, tokens.num_left, since_1970_s + tokens.at_s))
            write = "INSERT OR REPLACE INTO tenant_tokens VALUES (?, ?, ?, ?)"
            await self._file.write((_FORGET_FULL, (time.time(),)), *((write, row) for row in rows))
            self._num_saved |= changed
