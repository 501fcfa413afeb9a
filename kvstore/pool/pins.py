"""Pins, which keep blocks in the pool while no request uses them: hot prefixes, context caches.

A *hard* pin keeps its block in DRAM in any case, a *soft* pin as long as other blocks can be evicted instead.
Each pin has a deadline. A block has at most one pin, and a soft pin does not replace a hard pin.

Owns: the pins. Does not know: who else uses a page.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.pool.allocator import PageAllocator
from kvstore.pool.deadlines import Deadlines
from mooncake.errors import PoolError
from mooncake.messages.blocks import BlockKey


@dataclass(frozen=True, slots=True)
class _Pin:
    """The pin of the block `key`, which is in `page`."""

    key: BlockKey
    page: int
    is_hard: bool


class Pins:
    """The pins on blocks of one tier. A hard pin is a user of its page, which `remove_user` removes."""

    def __init__(self, allocator: PageAllocator, remove_user: Callable[[Sequence[int]], None]) -> None:
        self._allocator = allocator
        self._remove_user = remove_user
        self._by_key: dict[BlockKey, _Pin] = {}
        self._deadlines = Deadlines[BlockKey]()
        self._num_hard = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: BlockKey) -> bool:
        """Return whether a block has a pin, hard or soft."""
        return key in self._by_key

    def add(self, keys: Sequence[BlockKey], *, hard: bool, deadline_s: float) -> int:
        """Pin the blocks of `keys` that are in DRAM, or renew their pins. Returns the number of these blocks.

        A hard pin is neither replaced nor renewed by a soft pin. Raises PoolError, and pins nothing, if hard
        pins would take more than half of the pool.
        """
        index, num_pages = self._allocator.index, self._allocator.table.num_pages
        pages = {key: page for key in keys if (page := index.get(key)) is not None}
        num_hard = self._num_hard + sum(hard and not self._is_hard(key) for key in pages)
        if num_hard > num_pages // 2:
            raise PoolError(
                f"{num_hard} of {num_pages} pages would be pinned hard, at most half may be;"
                " unpin others or pin softly"
            )
        for key, page in pages.items():
            if hard or not self._is_hard(key):
                self._put(_Pin(key, page, hard))
                self._deadlines.set(key, deadline_s)
        return len(pages)

    def remove(self, keys: Iterable[BlockKey], *, hard: bool = True) -> int:
        """Remove pins of blocks. Returns the number of removed pins.

        `hard`: whether hard pins are removed too.
        """
        num_removed = 0
        for key in keys:
            if key in self._by_key and (hard or not self._is_hard(key)):
                self._deadlines.remove(key)
                self._end(self._by_key.pop(key))
                num_removed += 1
        return num_removed

    def expire(self, now_s: float) -> None:
        """Remove every pin whose deadline has passed."""
        for key in self._deadlines.take_expired(now_s):
            self._end(self._by_key.pop(key))

    def hard_pages(self) -> list[int]:
        return [pin.page for pin in self._by_key.values() if pin.is_hard]

    def _is_hard(self, key: BlockKey) -> bool:
        return key in self._by_key and self._by_key[key].is_hard

    def _put(self, pin: _Pin) -> None:
        """Set a pin, in place of an earlier pin of the block."""
        if pin.is_hard:
            self._allocator.add_user([pin.page])
            self._num_hard += 1
        if (previous := self._by_key.get(pin.key)) is not None:
            self._end(previous)
        if not pin.is_hard:
            self._allocator.pin_softly(pin.page, True)
        self._by_key[pin.key] = pin

    def _end(self, pin: _Pin) -> None:
        """End the effect of a pin on its page."""
        if pin.is_hard:
            self._num_hard -= 1
            self._remove_user([pin.page])
        else:
            self._allocator.pin_softly(pin.page, False)
