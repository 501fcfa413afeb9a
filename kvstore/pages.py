"""The page table: state, generation, key and checksums of every page, beside the data.

    FREE -> RESERVED -> SEALED -> FREE
               |          |
               +-> QUARANTINED -> FREE

Invariant: a page is SEALED only while all of its layers, their checksums and its key are in place, so a
SEALED page of a dead process can be adopted. Therefore a page's state is always written last when it
becomes SEALED and first when it ceases to be. A process may die between any two of these writes.

A QUARANTINED page has been given up, but a transfer from or into it may still be outstanding, or
somebody still reads it: it is freed by the last of them. The generation of a page is bumped when it is
freed, so a late write that names the old one is refused.

Owns: per-page facts that outlive a process. Does not know: who uses a page.
"""

from enum import IntEnum
from typing import Any

import numpy as np

from messenger.protocol import CHECKSUM_BYTES
from mooncake.blocks import KEY_BYTES, BlockKey

_GENERATIONS = 1 << 32


class PageState(IntEnum):
    """What a page is used for. FREE is 0: a zeroed table is an empty pool."""

    FREE = 0
    RESERVED = 1
    SEALED = 2
    QUARANTINED = 3


TRANSITIONS: dict[PageState, frozenset[PageState]] = {
    PageState.FREE: frozenset({PageState.RESERVED}),
    PageState.RESERVED: frozenset({PageState.SEALED, PageState.QUARANTINED, PageState.FREE}),
    PageState.SEALED: frozenset({PageState.QUARANTINED, PageState.FREE}),
    PageState.QUARANTINED: frozenset({PageState.FREE}),
}


def page_dtype(num_layers: int) -> np.dtype[np.void]:
    """One page's entry. `last_use` grows with every use of any page (0: never sealed)."""
    return np.dtype(
        [
            ("state", "u1"),
            ("generation", "<u4"),
            ("last_use", "<u8"),
            ("key", f"V{KEY_BYTES}"),
            ("checksums", "<u8", (num_layers,)),
        ],
        align=True,  # so that generation, last_use and each checksum are written by one store
    )


class PageTable:
    """A view of the table in a segment (or in plain memory), changed only along `TRANSITIONS`."""

    def __init__(self, records: "np.ndarray[Any, np.dtype[np.void]]") -> None:
        self.num_pages = len(records)
        self.num_layers: int = records.dtype["checksums"].shape[0]
        self._state = records["state"]
        self._generation = records["generation"]
        self._last_use = records["last_use"]
        self._key = records["key"]
        self._checksums = records["checksums"]

    @classmethod
    def in_memory(cls, num_pages: int, num_layers: int) -> "PageTable":
        return cls(np.zeros(num_pages, page_dtype(num_layers)))

    def state(self, page: int) -> PageState:
        return PageState(int(self._state[page]))

    def generation(self, page: int) -> int:
        return int(self._generation[page])

    def key(self, page: int) -> BlockKey:
        return bytes(self._key[page].tobytes())

    def last_use(self, page: int) -> int:
        return int(self._last_use[page])

    def checksums(self, page: int, layers: range) -> bytes:
        """One little-endian xxh3-64 per layer of `layers`."""
        return self._checksums[page, layers.start : layers.stop].tobytes()

    def count(self) -> dict[PageState, int]:
        """Number of pages in each state."""
        counts = np.bincount(self._state, minlength=len(PageState)).tolist()
        return {state: counts[state] for state in PageState}

    def reserve(self, page: int) -> None:
        self._move(page, PageState.RESERVED)

    def set_checksums(self, page: int, layers: range, checksums: bytes) -> None:
        assert self.state(page) is PageState.RESERVED
        assert len(checksums) == len(layers) * CHECKSUM_BYTES
        self._checksums[page, layers.start : layers.stop] = np.frombuffer(checksums, "<u8")

    def seal(self, page: int, key: BlockKey, last_use: int) -> None:
        """The data and all checksums are there already."""
        assert len(key) == KEY_BYTES
        self._key[page] = np.void(key)
        self._last_use[page] = last_use
        self._move(page, PageState.SEALED)

    def touch(self, page: int, last_use: int) -> None:
        self._last_use[page] = last_use

    def quarantine(self, page: int) -> None:
        self._move(page, PageState.QUARANTINED)

    def free(self, page: int) -> None:
        self._move(page, PageState.FREE)
        self._bump(page)

    def adopt(self) -> list[int]:
        """After the death of the owner: frees all that is not SEALED, returns the rest, oldest use first."""
        sealed = []
        keys = set()
        for page, state in enumerate(self._state.tolist()):
            if state == PageState.SEALED and (key := self.key(page)) not in keys:
                keys.add(key)
                sealed.append(page)
            else:
                self._state[page] = PageState.FREE
                self._bump(page)
        return sorted(sealed, key=self.last_use)

    def _move(self, page: int, state: PageState) -> None:
        assert state in TRANSITIONS[self.state(page)], f"page {page}: {self.state(page).name} -> {state.name}"
        self._state[page] = state

    def _bump(self, page: int) -> None:
        self._generation[page] = (self.generation(page) + 1) % _GENERATIONS
