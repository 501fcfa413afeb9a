"""The peers of one listener that wait: to be authenticated, or to ask for something.

Owns: who makes room when there are too many. Does not know: sockets, how a peer shows who it is.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


class Crowd(Generic[Peer]):
    """At most `limit` peers; one more puts out the one that has been there longest.

    A peer that belongs here does not wait for long, so that peers that only stand there make room for it, and
    never the other way round.
    """

    def __init__(self, limit: int, put_out: Callable[[Peer], None]) -> None:
        """`put_out` is called with a peer that has made room, and is not there any more."""
        self._limit, self._put_out = limit, put_out
        self._peers: dict[Peer, None] = {}
        """oldest first"""

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, peer: Peer) -> None:
        """One more peer, which is not there yet."""
        self._peers[peer] = None
        if len(self._peers) > self._limit:
            self.make_room()

    def make_room(self) -> bool:
        """Put out the oldest. Whether there was one."""
        if not self._peers:
            return False
        oldest = next(iter(self._peers))
        del self._peers[oldest]
        self._put_out(oldest)
        return True

    def leave(self, peer: Peer) -> bool:
        """The peer waits no more, or is gone. Whether it was still there."""
        if peer not in self._peers:
            return False
        del self._peers[peer]
        return True
