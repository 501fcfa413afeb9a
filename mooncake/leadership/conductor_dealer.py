"""A worker's or front's socket to the Conductor that leads.

Owns: which Conductor it is connected to. Does not know: the messages.
"""

from typing import Any, TypeVar

from mooncake.bus.zeromq import Dealer
from mooncake.leadership.leaders import Leaders
from mooncake.security.keys import ClusterKey

Incoming = TypeVar("Incoming")


class ConductorDealer(Dealer[Incoming]):
    """A `Dealer` to the known leader, if there is one yet, and to its successors."""

    def __init__(self, leaders: Leaders, identity: bytes, incoming: Any, key: ClusterKey) -> None:
        self._leaders, self._leader = leaders, leaders.latest
        super().__init__(None if self._leader is None else self._leader.endpoint, identity, incoming, key)

    @property
    def least_epoch(self) -> int:
        """The epoch of the leader; 0 while no leader is known.

        A Conductor with a lower epoch does not lead any more, and is not obeyed.
        """
        return 0 if self._leader is None else self._leader.epoch

    num_queued = 0
    """The messages that the Conductor has not read: 0, as a socket does not tell their number."""

    async def follow(self) -> None:
        """Wait until another Conductor leads, and connect to it."""
        self._leader = await self._leaders.after(self._leader)
        self.move_to(self._leader.endpoint)
