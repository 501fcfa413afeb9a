"""The fronts that a gateway can send requests to, and which one is next.

A cluster's fronts are equal, as its Conductor places requests whichever front has them. Of several clusters
the one with the fewest requests for each decode instance is next.

Owns: what was last heard of each front, its requests. Does not know: how fronts are found and asked, Envoy.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

READY_FOR_S = 10.0
"""Seconds for which a front counts as ready after its latest report that it is.

A front keeps requests while one Conductor follows another, and reports by itself if that takes long.
"""
MOST_ENDPOINTS = 5
"""Addresses in an answer: the first is the choice, the others are for a gateway's retries."""


@dataclass(slots=True)
class WatchedFront:
    """A front that answers the picker's checks."""

    address: str
    """The front's address: `ip:port`, or `[ip]:port` for IPv6."""
    cluster: str
    num_decode: int
    """Decode instances that its Conductor had when the front was last ready, at least 1."""
    ready_s: float
    """The time of the latest report that the front is ready, in seconds."""
    num_requests: int = 0
    turn: int = 0
    """The sequence number of the front's latest request among all requests: equal fronts take turns."""


class WatchedFronts:
    """All fronts that answer the picker's checks."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._fronts: dict[str, WatchedFront] = {}
        self._turn = 0

    def is_ready(self, address: str, cluster: str, num_decode: int) -> None:
        """Record that a front is ready."""
        now_s = self._now()
        front = self._fronts.setdefault(address, WatchedFront(address, cluster, 1, now_s))
        front.cluster, front.num_decode, front.ready_s = cluster, max(1, num_decode), now_s

    def is_gone(self, address: str) -> None:
        """Remove a front that does not answer or no longer exists. Idempotent."""
        self._fronts.pop(address, None)

    def addresses(self, cluster: str) -> set[str]:
        """Return the addresses of a cluster's fronts that answer."""
        return {front.address for front in self._fronts.values() if front.cluster == cluster}

    def choose(self, allowed: Collection[str] | None = None) -> list[str]:
        """Return the addresses of fronts for a request, the best first; none if no front is ready.

        The second one is of another cluster, if there are several: a gateway that tries again when the first
        one says 429 or 503 has another Conductor decide.

        Args:
            allowed: The addresses, or IPs alone, to choose from; None: all.
        """
        since_s = self._now() - READY_FOR_S
        able = [
            front
            for front in self._fronts.values()
            if front.ready_s >= since_s and (allowed is None or _is_among(front.address, allowed))
        ]
        able.sort(key=lambda front: (front.num_requests, front.turn))
        of_clusters: dict[str, list[WatchedFront]] = {}
        for front in able:
            of_clusters.setdefault(front.cluster, []).append(front)
        by_load = sorted(of_clusters.values(), key=_load)
        best = [fronts[0] for fronts in by_load]
        others = [front for fronts in by_load for front in fronts[1:]]
        return [front.address for front in best + others][:MOST_ENDPOINTS]

    def begins(self, address: str) -> WatchedFront | None:
        """Count a request at a front, and return the front for `ends`; None if no front has this address."""
        self._turn += 1
        if (front := self._fronts.get(address)) is not None:
            front.num_requests += 1
            front.turn = self._turn
        return front

    @staticmethod
    def ends(front: WatchedFront) -> None:
        """Stop counting a request at a front.

        A front that was gone meanwhile has been counted anew, without the request.
        """
        front.num_requests -= 1


def _is_among(address: str, allowed: Collection[str]) -> bool:
    return address in allowed or address.rpartition(":")[0].strip("[]") in allowed


def _load(fronts: list[WatchedFront]) -> tuple[float, int]:
    """Return a cluster's requests for each decode instance, and the latest turn of its fronts."""
    num_requests = sum(front.num_requests for front in fronts)
    return num_requests / max(front.num_decode for front in fronts), max(front.turn for front in fronts)
