"""Deadlines of leases and pins, soonest first.

Owns: deadlines. Does not know: the leases and pins themselves, the clock.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

_SPARE_ENTRIES = 1000
"""The heap may have as many outdated entries as there are deadlines, and this number more."""

Name = TypeVar("Name", int, bytes)


class Deadlines(Generic[Name]):
    """One deadline for each name. Setting a deadline takes logarithmic time, removing it constant time.

    Invariant: each name's deadline is in the heap; other entries of the heap are out of date.
    """

    def __init__(self) -> None:
        self._of: dict[Name, float] = {}
        self._heap: list[tuple[float, Name]] = []

    @property
    def num_entries(self) -> int:
        """The number of entries in memory, outdated ones included."""
        return len(self._heap)

    def set(self, name: Name, deadline_s: float) -> None:
        """Set the deadline of `name`, in place of an earlier deadline."""
        self._of[name] = deadline_s
        heapq.heappush(self._heap, (deadline_s, name))
        if len(self._heap) > 2 * len(self._of) + _SPARE_ENTRIES:
            self._heap = [(deadline_s, name) for name, deadline_s in self._of.items()]
            heapq.heapify(self._heap)

    def remove(self, name: Name) -> None:
        """Remove the deadline of `name`."""
        del self._of[name]

    def take_expired(self, now_s: float) -> Iterator[Name]:
        """Yield and remove every name whose deadline has passed."""
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, name = heapq.heappop(self._heap)
            if self._of.get(name) == deadline_s:
                del self._of[name]
                yield name
