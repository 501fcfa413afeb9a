"""Pins: blocks that are to stay although nobody uses them now (hot prefixes, a tenant's cached context).

A *hard* pin keeps its block in DRAM at any price, a *soft* one as long as others can be evicted instead.
Each has a deadline; a block has at most one, and a soft one does not take the place of a hard one.

Owns: the pins. Does not know: how a page is kept.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from mooncake.blocks import BlockKey

_SPARE_DEADLINES = 1000


@dataclass(frozen=True, slots=True)
class Pin:
    """The block `key`, which is in `page`."""

    key: BlockKey
    page: int
    is_hard: bool
    deadline_s: float


class Pins:
    """All pins of a pool."""

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, Pin] = {}
        self._deadlines: list[tuple[float, BlockKey]] = []
        self.num_hard = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._by_key

    def is_hard(self, key: BlockKey) -> bool:
        return key in self._by_key and self._by_key[key].is_hard

    def put(self, pin: Pin) -> Pin | None:
        """Adds `pin`; returns the one that it replaces."""
        previous = self.take(pin.key)
        self._by_key[pin.key] = pin
        self.num_hard += pin.is_hard
        heapq.heappush(self._deadlines, (pin.deadline_s, pin.key))
        if len(self._deadlines) > 2 * len(self._by_key) + _SPARE_DEADLINES:
            self._deadlines = [(kept.deadline_s, key) for key, kept in self._by_key.items()]
            heapq.heapify(self._deadlines)
        return previous

    def take(self, key: BlockKey) -> Pin | None:
        """Takes the pin of `key` away."""
        pin = self._by_key.pop(key, None)
        if pin is not None:
            self.num_hard -= pin.is_hard
        return pin

    def take_expired(self, now_s: float) -> Iterator[Pin]:
        """Takes away every pin whose deadline has come."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, key = heapq.heappop(self._deadlines)
            pin = self._by_key.get(key)
            if pin is not None and pin.deadline_s == deadline_s:  # else replaced or gone already
                self.take(key)
                yield pin

    def hard_pages(self) -> list[int]:
        return [pin.page for pin in self._by_key.values() if pin.is_hard]
