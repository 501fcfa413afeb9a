"""The fronts that a gateway can send requests to, and the choice of the next one.

All fronts of a cluster are equally good, as one Conductor places the requests of all of them. Among several
clusters, the one with the fewest requests per decode instance is chosen.

Owns: each front's latest report and its requests. Does not know: how fronts are found and asked, Envoy.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

READY_FOR_S = 10.0
"""Seconds for which a front counts as ready after its latest report that it is ready.

While another Conductor takes over, a front reports that it is not ready, and keeps its requests. Such a
report alone does not remove the front.
"""
MOST_ENDPOINTS = 5
"""The most addresses in an answer: the chosen front, and further fronts for a gateway's retries."""


@dataclass(slots=True)
class WatchedFront:
    """A front that answers the picker's checks."""

    address: str
    """The front's address: `ip:port`, or `[ip]:port` for IPv6."""
    cluster: str
    num_decode: int
    """The number of decode instances in the front's latest report that it is ready; at least 1."""
    ready_s: float
    """The time in seconds of the latest report that the front is ready."""
    num_requests: int = 0
    turn: int = 0
    """The number of the front's latest request. Fronts with equally many requests take turns by it."""


class WatchedFronts:
    """All fronts that answer the picker's checks."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._fronts: dict[str, WatchedFront] = {}
        self._turn = 0

    def is_ready(self, address: str, cluster: str, num_decode: int) -> None:
        """Record a front's report that it is ready."""
        now_s = self._now()
        front = self._fronts.setdefault(address, WatchedFront(address, cluster, 1, now_s))
        front.cluster, front.num_decode, front.ready_s = cluster, max(1, num_decode), now_s

    def is_gone(self, address: str) -> None:
        """Remove a front that does not answer or no longer exists. Idempotent."""
        self._fronts.pop(address, None)

    def addresses(self, cluster: str) -> set[str]:
        """Return the addresses of the fronts of a cluster that answer."""
        return {front.address for front in self._fronts.values() if front.cluster == cluster}

    def choose(self, allowed: Collection[str] | None = None) -> list[str]:
        """Return the addresses of fronts for a request, best first; none if no front is ready.

        The best fronts of all clusters come before further fronts. So a gateway that retries after a 429 or
        503 asks another Conductor.

        Args:
            allowed: The addresses to choose from, with or without port; None for all addresses.
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

        A front that was removed and found again has a new object, which has not counted the request.
        """
        front.num_requests -= 1


def _is_among(address: str, allowed: Collection[str]) -> bool:
    return address in allowed or address.rpartition(":")[0].strip("[]") in allowed


def _load(fronts: list[WatchedFront]) -> tuple[float, int]:
    """Return the sort key of a cluster: requests per decode instance, then the number of the latest request.

    `fronts` are the cluster's fronts that are ready.
    """
    num_requests = sum(front.num_requests for front in fronts)
    return num_requests / max(front.num_decode for front in fronts), max(front.turn for front in fronts)
