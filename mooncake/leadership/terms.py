"""The terms of Conductors: how a Conductor becomes the leader, and for how long.

Without etcd a Conductor leads from its start to its end. With etcd it leads when its key is the oldest of all
Conductors' keys, until its lease in etcd has expired. While etcd does not answer, nothing changes: a leader
goes on, and no other Conductor takes its place.

Owns: the lease of this process in etcd. Does not know: what a leader does, how others find it
(`mooncake.leadership.leaders`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec

from mooncake.config.cluster_section import ClusterConfig
from mooncake.errors import ConfigError, MooncakeError
from mooncake.leadership.etcd import Etcd, LeaseLostError, RefusedError, UnreachableError
from mooncake.leadership.leaders import CONDUCTORS, RETRY_S, Candidate, Reach, candidate_of

RENEWALS_PER_LEASE = 3
_LAST_CALL_S = 1.0
"""Seconds, at most, for telling etcd that a process has ended."""


class LeadershipLostError(MooncakeError):
    """The lease of this process in etcd has expired, so that the process neither leads nor stands by."""


class Standby(NamedTuple):
    """The state of a Conductor that does not lead.

    `leader` is None while unknown; `waits_for` says to people what the Conductor waits for.
    """

    leader: Candidate | None
    waits_for: str


class Term:
    """The time for which this process leads.

    `epoch` is larger than that of any Conductor that has led before.
    """

    def __init__(self, epoch: int, reach: Reach | None = None) -> None:
        self.epoch, self.reach = epoch, reach or Reach()
        self._lost = asyncio.Event()

    def lose(self) -> None:
        """End the term."""
        self._lost.set()

    async def end(self) -> None:
        """Wait until the term has ended. Raises LeadershipLostError then."""
        await self._lost.wait()
        raise LeadershipLostError


@contextlib.asynccontextmanager
async def leading(
    cluster: ClusterConfig,
    candidate: Candidate,
    life: int,
    reach: Reach,
    on_wait: Callable[[Standby], None],
) -> AsyncIterator[Term]:
    """Make a context in which this process leads: wait for the leadership, and give it up at the end.

    The process leads until the context or the term ends.

    Args:
        cluster: The section of the configuration. Without etcd this process leads at once.
        candidate: The addresses of this process.
        life: A number that grows with each start of a Conductor. Without etcd it is the epoch. With etcd it
            is the number of the lease, and the epoch is etcd's revision that made this process a candidate.
        reach: Records whether etcd answers.
        on_wait: Called with what this process waits for, whenever that changes.

    Raises LeadershipLostError if the lease expires during the wait. Raises ConfigError for unusable files, if
    etcd refuses this process, and if the process does not fit the Conductor that leads. With etcd, these
    errors and those of the context's body may be in an ExceptionGroup.
    """
    if not cluster.has_standbys:
        yield Term(life)
        return
    term = Term(0, reach)
    async with Etcd(cluster) as etcd, asyncio.TaskGroup() as group:
        await _take_lease(etcd, life, cluster.etcd_lease_s, reach, on_wait)
        keeping = group.create_task(_keep(etcd, life, cluster.etcd_lease_s, term))
        try:
            async with asyncio.TaskGroup() as waiting:
                losing = waiting.create_task(term.end())
                key = conductor_key(cluster, life)
                term.epoch = await _win(etcd, key, life, candidate, reach, on_wait)
                losing.cancel()
            yield term
        finally:
            keeping.cancel()
            await _revoke(etcd, life)


def conductor_key(cluster: ClusterConfig, life: int) -> bytes:
    """Return the key of the Conductor whose lease is `life`. The key exists as long as the lease."""
    return f"{cluster.etcd_prefix}/{CONDUCTORS}/{life:x}".encode()


async def end_lease(cluster: ClusterConfig, life: int) -> None:
    """End the lease of a Conductor whose process has ended, so that another one leads at once."""
    if cluster.has_standbys:
        async with Etcd(cluster) as etcd:
            await _revoke(etcd, life)


async def _revoke(etcd: Etcd, lease: int) -> None:
    with contextlib.suppress(MooncakeError, TimeoutError):  # a lease also expires by itself
        async with asyncio.timeout(_LAST_CALL_S):
            await etcd.revoke(lease)


async def _take_lease(
    etcd: Etcd, lease: int, ttl_s: int, reach: Reach, on_wait: Callable[[Standby], None]
) -> None:
    while True:
        try:
            await etcd.grant(lease, ttl_s)
            reach.succeeded()
            return
        except RefusedError as error:
            raise ConfigError(f"cluster.etcd_endpoints: {error}") from None
        except UnreachableError as error:
            reach.failed(error)
            on_wait(Standby(None, f"waits for etcd: {error}"))
        await asyncio.sleep(RETRY_S)


async def _keep(etcd: Etcd, lease: int, ttl_s: int, term: Term) -> None:
    """Renew the lease until it has expired, and end the term then."""
    while True:
        await asyncio.sleep(ttl_s / RENEWALS_PER_LEASE)
        try:
            await etcd.keep_alive(lease)
            term.reach.succeeded()
        except LeaseLostError:
            term.lose()
            return
        except (RefusedError, UnreachableError) as error:
            term.reach.failed(error)


async def _win(
    etcd: Etcd,
    key: bytes,
    lease: int,
    candidate: Candidate,
    reach: Reach,
    on_wait: Callable[[Standby], None],
) -> int:
    """Create the key of this process, wait until it is the oldest, and return its revision."""
    conductors = key.rpartition(b"/")[0]
    while True:
        try:
            await etcd.create(key, msgspec.json.encode(candidate), lease)
            async with contextlib.aclosing(etcd.first(conductors)) as keys:
                async for first in keys:
                    if first.key == key:
                        return first.revision
                    leader = candidate_of(first)
                    candidate.check_beside(leader)
                    on_wait(Standby(leader, f"stands by for the conductor at {leader.endpoint}"))
        except LeaseLostError:
            raise LeadershipLostError from None
        except (RefusedError, UnreachableError) as error:
            reach.failed(error)
            await asyncio.sleep(RETRY_S)
