"""The keys in etcd that keep a leader's state, so that the next leader finds it.

Only the leader changes them, in the order of its calls. etcd refuses changes of a process whose lease has
ended, even before the process knows of that. It also refuses a change whose answer was lost, once a later
change has been made.

Owns: the key that guards the order, the retries of a read. Does not know: what the values mean.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping

from mooncake.config.cluster_section import ClusterConfig
from mooncake.errors import ConfigError, NotStoredError
from mooncake.leadership.etcd import Etcd, LeaseLostError, RefusedError, UnreachableError
from mooncake.leadership.leaders import RETRY_S

WRITERS = "writers"
"""The prefix, behind the cluster's prefix, of the keys that guard the order of changes.

There is one key for each leader.
"""
MAX_KEYS = 100
"""The most keys in one change, which is one transaction of etcd.

By default etcd allows 128 operations in one.
"""
LATE_S = 0.5
"""A change that fails after at least this many seconds has failed late.

Then the callers that wait for their turn behind it fail too.
"""
log = logging.getLogger(__name__)


class StateKeys:
    """The keys below the cluster's prefix, for the leader whose lease is `life`."""

    def __init__(self, etcd: Etcd, cluster: ClusterConfig, life: int) -> None:
        self._etcd, self._prefix, self._life = etcd, cluster.etcd_prefix, life
        self._guard, self._revision = f"{self._prefix}/{WRITERS}/{life:x}".encode(), 0
        self._changing = asyncio.Lock()
        self._fails, self._num_late = False, 0

    async def read(self, folder: str, at_once: int) -> dict[str, bytes]:
        """Return the values of all keys in a folder, by name. Waits until etcd answers.

        `at_once`: the number of keys in one answer, few enough that etcd begins to answer within a few
        seconds. Raises ConfigError if etcd refuses.
        """
        prefix = f"{self._prefix}/{folder}".encode()
        found, last, is_whole = dict[str, bytes](), prefix + b"/", False
        while not is_whole:
            try:
                page = await self._etcd.page(prefix, last, at_once)
            except RefusedError as error:
                raise ConfigError(f"cluster.etcd_endpoints: {error}") from None
            except UnreachableError as error:
                log.warning("etcd does not tell what the last leader has kept: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            found |= {key[len(prefix) + 1 :].decode(): value for key, value in page}
            is_whole = len(page) < at_once
            last = page[-1][0] if page else last
        return found

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Make a context in which the caller may call `change`.

        Callers get their turns one after the other, in the order of their calls. Raises NotStoredError if a
        change of an earlier caller has failed late during the wait: otherwise the waits of all callers would
        add up.
        """
        num_late = self._num_late
        async with self._changing:
            if num_late != self._num_late:
                raise _not_taken()
            yield

    async def change(self, values: Mapping[str, bytes | None]) -> None:
        """Set keys, or remove those whose value is None, all or none. To be called within `turn`.

        Raises NotStoredError. In that case etcd may have made the change all the same, or may still make it
        as long as no later change is made.
        """
        changes = {f"{self._prefix}/{name}".encode(): value for name, value in values.items()}
        begun_s = time.monotonic()
        try:
            is_made = False
            while not is_made:  # else an earlier change was made after all
                is_made, self._revision = await self._etcd.change(
                    changes, self._guard, self._revision, self._life
                )
        except LeaseLostError:
            raise NotStoredError("this conductor does not lead any more") from None
        except (RefusedError, UnreachableError) as error:
            if not self._fails:
                log.error("nothing can be stored in etcd: %s", error)
            self._fails = True
            self._num_late += time.monotonic() - begun_s >= LATE_S
            raise _not_taken() from None
        if self._fails:
            log.warning("etcd stores what it is given again")
        self._fails = False


def _not_taken() -> NotStoredError:
    return NotStoredError("etcd does not take it")
