"""A limit on how many peers of one listener may wait, to be authenticated or before they send a request.

Owns: which peer is dropped when there are too many. Does not know: sockets, authentication.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


class WaitingPeers(Generic[Peer]):
    """A set of at most `limit` waiting peers; one more drops the peer that has waited longest.

    Legitimate peers wait only for a short time, so the dropped peer is most likely an idle one.
    """

    def __init__(self, limit: int, drop: Callable[[Peer], None]) -> None:
        """Begin with an empty set. `drop` is called with each dropped peer."""
        self._limit, self._drop = limit, drop
        self._peers: dict[Peer, None] = {}
        """Waiting peers, oldest first."""

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, peer: Peer) -> None:
        """Add a peer, and drop the oldest peer if there are too many then.

        A peer that is in the set already keeps its place in the order.
        """
        self._peers[peer] = None
        if len(self._peers) > self._limit:
            self.make_room()

    def make_room(self) -> bool:
        """Drop the oldest peer. Returns whether there was one."""
        if not self._peers:
            return False
        oldest = next(iter(self._peers))
        del self._peers[oldest]
        self._drop(oldest)
        return True

    def leave(self, peer: Peer) -> bool:
        """Remove a peer that no longer waits. Returns whether it was in the set."""
        if peer not in self._peers:
            return False
        del self._peers[peer]
        return True
