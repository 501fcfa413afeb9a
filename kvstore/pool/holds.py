"""Holds: claims on single pages, while their bytes may be read or written.

Holds are taken for a transfer, for a copy to SSD, for a comparison with the checksums, and for a *former
writer*: a process that an earlier messenger process let write to pages, and that may still be writing. The
mover also holds pages whose blocks it keeps in DRAM for a request.

Owns: the holds on each page, the former writers. Does not know: reservations, leases, pins.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from kvstore.pool.allocator import PageAllocator
from kvstore.pool.pages import SEALED, PageWriter


class RemoveUser(Protocol):
    """A function that removes one user of each of `pages`, as `PageAllocator.remove_user` does."""

    def __call__(self, pages: list[int], /, *, used: bool) -> None: ...


class Holds:
    """The holds of a pool. `remove_user` is called when a hold ends.

    At the beginning there is a hold for each page that the allocator has adopted with a writer.
    """

    def __init__(self, allocator: PageAllocator, remove_user: RemoveUser) -> None:
        self._allocator, self._remove_user = allocator, remove_user
        self._num_of: Counter[int] = Counter()
        self._former_writers: dict[PageWriter, list[int]] = {}
        for page, writer in allocator.adopted_writers.items():
            self._add(page)
            self._former_writers.setdefault(writer, []).append(page)

    @property
    def num_of(self) -> Mapping[int, int]:
        """The number of holds on each page that has holds."""
        return self._num_of

    def are_all_users(self, page: int) -> bool:
        """Return whether all users of a page are holds."""
        return self._num_of[page] == self._allocator.num_users_of[page]

    def add(self, page: int) -> None:
        """Add a hold to `page` until `remove`. The page must be SEALED or have a user."""
        assert self._allocator.num_users[page] or self._allocator.table.state_of[page] == SEALED
        self._add(page)

    def remove(self, page: int, *, used: bool = True) -> None:
        """End a hold: the transfer, copy or writer reads or writes `page` no longer.

        `used`: whether the end counts as a use of the block, for the order of eviction.
        """
        self._num_of[page] -= 1
        assert self._num_of[page] >= 0
        if not self._num_of[page]:
            del self._num_of[page]
        self._remove_user([page], used=used)

    def _add(self, page: int) -> None:
        self._num_of[page] += 1
        self._allocator.add_user([page])

    # -- former writers -----------------------------------------------------------------------------

    @property
    def former_writers(self) -> list[PageWriter]:
        """The processes that may still be writing to pages that an earlier messenger process gave them."""
        return list(self._former_writers)

    def keep_aside(self, writer: PageWriter) -> None:
        """Record that `writer` may be writing to every page that a former writer may be writing to.

        The page table names one writer for each page, but several processes may have been copying there.
        """
        pages = {page for pages in self._former_writers.values() for page in pages}
        own = self._former_writers.setdefault(writer, [])
        for page in pages.difference(own):
            self._add(page)
            own.append(page)

    def writer_gone(self, writer: PageWriter) -> None:
        """End the holds for this former writer, which has stopped writing. Idempotent."""
        for page in self._former_writers.pop(writer, []):
            self.remove(page)
