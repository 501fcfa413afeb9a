"""The unauthenticated peers of one listener.

Owns: who makes room when there are too many. Does not know: sockets, how a peer shows who it is.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


class Crowd(Generic[Peer]):
    """At most `limit` peers; one more puts out the one that has been there longest.

    A peer that belongs here is authenticated within milliseconds, so that peers that only stand there make
    room for it, and never the other way round.
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
            oldest = next(iter(self._peers))
            del self._peers[oldest]
            self._put_out(oldest)

    def leave(self, peer: Peer) -> bool:
        """The peer is authenticated or gone. Whether it was still there."""
        if peer not in self._peers:
            return False
        del self._peers[peer]
        return True
