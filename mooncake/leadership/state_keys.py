"""The keys in which a leader's state outlives its process: etcd's, where its successor finds them.

Only the leader changes them: etcd refuses a process whose lease has ended, even if nobody has told it yet.

Owns: when a change is refused, when reading is tried again. Does not know: what the values mean.
"""

import asyncio
import logging
import math

from mooncake.config.cluster_section import ClusterConfig
from mooncake.errors import ConfigError, NotStoredError
from mooncake.leadership.etcd import Etcd, LeaseLostError, RefusedError, UnreachableError
from mooncake.leadership.leaders import RETRY_S
from mooncake.leadership.terms import conductor_key

log = logging.getLogger(__name__)


class StateKeys:
    """The keys below the cluster's prefix, read and changed by the leader of the lease `life`."""

    def __init__(self, etcd: Etcd, cluster: ClusterConfig, life: int) -> None:
        self._etcd, self._prefix = etcd, cluster.etcd_prefix
        self._leader = conductor_key(cluster, life)
        self._changing = asyncio.Lock()

    async def read(self, folder: str) -> list[bytes]:
        """Return the values of all keys in a folder; waits until etcd answers. Raises ConfigError."""
        while True:
            try:
                return await self._etcd.values(f"{self._prefix}/{folder}/".encode())
            except RefusedError as error:
                raise ConfigError(f"cluster.etcd_endpoints: {error}") from None
            except UnreachableError as error:
                log.warning("etcd does not tell what the last leader has kept: %s", error)
            await asyncio.sleep(RETRY_S)

    async def put(self, name: str, value: bytes, ttl_s: float | None = None) -> None:
        """Set a key, which ends after `ttl_s`. Raises NotStoredError."""
        await self._change(name, value, ttl_s)

    async def remove(self, name: str) -> None:
        """Remove a key. Idempotent. Raises NotStoredError."""
        await self._change(name, None, None)

    async def _change(self, name: str, value: bytes | None, ttl_s: float | None) -> None:
        """Change a key, after all changes that were asked for before."""
        key = f"{self._prefix}/{name}".encode()
        async with self._changing:
            try:
                lease = 0 if ttl_s is None else await self._etcd.new_lease(max(1, math.ceil(ttl_s)))
                await self._etcd.change(key, value, lease, beside=self._leader)
            except LeaseLostError:
                raise NotStoredError("this conductor does not lead any more") from None
            except (RefusedError, UnreachableError) as error:
                log.error("%s cannot be written to etcd: %s", name, error)
                raise NotStoredError("etcd does not take it") from None
