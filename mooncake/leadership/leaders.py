"""The Conductor that leads, as fronts and workers learn of it: from the configuration, or from etcd.

Owns: the known leader, the tasks that wait for the next one. Does not know: how a Conductor becomes leader
(`mooncake.leadership.terms`).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from mooncake.config.cluster_section import ClusterConfig
from mooncake.config.conductor_section import ConductorConfig
from mooncake.errors import ConfigError
from mooncake.leadership.etcd import Etcd, FirstKey, RefusedError, UnreachableError
from mooncake.versions import Versions

CONDUCTORS = "conductors"
"""The prefix of the Conductors' keys, behind the cluster's prefix.

The Conductor with the oldest key leads.
"""
RETRY_S = 0.5
"""Seconds between two tries to reach etcd."""
log = logging.getLogger(__name__)


class Reach:
    """The record of whether etcd answers. Each change is logged once."""

    def __init__(self) -> None:
        self.is_given = True

    def succeeded(self) -> None:
        """Record an answer."""
        if not self.is_given:
            log.warning("etcd answers again")
        self.is_given = True

    def failed(self, error: Exception) -> None:
        """Record that no answer has come."""
        if self.is_given:
            log.warning("etcd does not answer: no conductor takes over from another one now (%s)", error)
        self.is_given = False


class Fit(msgspec.Struct, frozen=True):
    """The properties that all Conductors of a cluster share with its fronts and workers."""

    versions: Versions
    """The versions of the protocol that a Conductor speaks."""
    fingerprint: str
    """The fingerprint of the model, with dtype and block size."""
    key_id: str
    """The id of the cluster key."""

    def difference(self, theirs: "Fit") -> str:
        """Return a text about how another Conductor differs from this one.

        The text is empty if each can take over from the other.
        """
        if self.key_id != theirs.key_id:
            return f"has another cluster key: {theirs.key_id}, here it is {self.key_id}"
        if self.versions.common(theirs.versions) is None:
            advice = self.versions.advice("this one", theirs.versions, "that one")
            return f"speaks protocol {theirs.versions}, this one {self.versions}; {advice}"
        if self.fingerprint != theirs.fingerprint:
            return "serves another model, or with another dtype or block size; give both the same"
        return ""


class Candidate(msgspec.Struct, frozen=True):
    """A Conductor's addresses and properties: the value of its key in etcd."""

    endpoint: str
    """The endpoint to which workers and fronts connect."""
    url: str
    """The address of the Conductor's HTTP routes, for people."""
    fit: Fit | None = None
    """The properties that must fit; None from a release that does not send them."""

    def check_beside(self, leader: "Candidate") -> None:
        """Check that the fronts and workers of `leader` would accept this Conductor as its successor.

        Raises ConfigError.
        """
        if self.fit is None or leader.fit is None:
            return
        if difference := self.fit.difference(leader.fit):
            raise ConfigError(f"the conductor that leads, at {leader.endpoint}, {difference}")


def candidate_of(key: FirstKey) -> Candidate:
    """Return the Conductor that has this key.

    Raises RefusedError if the value of the key is no Conductor's.
    """
    try:
        return msgspec.json.decode(key.value, type=Candidate)
    except msgspec.MsgspecError as error:
        raise RefusedError(f"the value of {key.key.decode()} is no conductor's: {error}") from None


class Leader(NamedTuple):
    """The Conductor that leads. Its messages have this `epoch`; 0 stands for any epoch."""

    endpoint: str
    epoch: int = 0


class Leaders:
    """The known leader, and its successors."""

    def __init__(self, leader: Leader | None = None) -> None:
        self.latest = leader
        """The latest known leader; None before the first."""
        self.reach = Reach()
        self._changed = asyncio.Event()

    def tell(self, leader: Leader) -> None:
        """Set the leader, and wake all tasks that wait for one."""
        if leader != self.latest:
            self.latest = leader
            self._changed.set()
            self._changed = asyncio.Event()

    async def known(self) -> Leader:
        """Wait until a leader is known."""
        while self.latest is None:
            await self._changed.wait()
        return self.latest

    async def after(self, leader: Leader | None) -> Leader:
        """Wait until a leader other than `leader` is known."""
        while self.latest is None or self.latest == leader:
            await self._changed.wait()
        return self.latest


@contextlib.asynccontextmanager
async def following(cluster: ClusterConfig, conductor: ConductorConfig) -> AsyncIterator[Leaders]:
    """Make a context in which the leaders of the cluster are followed.

    Without etcd the configured Conductor leads. Raises ConfigError, in an ExceptionGroup, for unusable files,
    and if etcd refuses this node at the start.
    """
    if not cluster.has_standbys:
        yield Leaders(Leader(conductor.endpoint))
        return
    leaders = Leaders()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_follow(cluster, leaders))
        yield leaders
        task.cancel()


async def _follow(cluster: ClusterConfig, leaders: Leaders) -> None:
    reach = leaders.reach
    async with Etcd(cluster) as etcd:
        while True:
            try:
                async for first in etcd.first(f"{cluster.etcd_prefix}/{CONDUCTORS}".encode()):
                    reach.succeeded()
                    candidate = candidate_of(first)
                    leaders.tell(Leader(candidate.endpoint, first.revision))
            except (UnreachableError, RefusedError) as error:
                if isinstance(error, RefusedError) and leaders.latest is None:
                    raise ConfigError(f"cluster.etcd_endpoints: {error}") from None
                reach.failed(error)
                await asyncio.sleep(RETRY_S)
