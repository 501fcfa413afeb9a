"""The page table: state, generation, key, use and checksums of every page, beside the data.

    FREE --> RESERVED --> SEALED --> FREE
                |            |
                +------------+--> QUARANTINED --> FREE
                |
                +--> FREE     (the page is private, its write was given up, or its key is sealed elsewhere)

A SEALED page becomes FREE when its block is evicted. A block that is removed or damaged passes QUARANTINED,
even if its page has no users.

A process may die between any two writes to the table. So each transition writes its fields in a fixed order:

    to RESERVED       writer, state
    to SEALED         layers and their checksums, key, state
    to QUARANTINED    state
    to FREE           generation, state

Two invariants follow. A page is SEALED only while all of its layers, their checksums and its key are in
place, so a SEALED page of a dead process can be adopted. A late write that names an old generation is
refused, even if the owner died in between.

A QUARANTINED page has been given up. The page is freed when its last user has gone, at once if it has none.
Users are reservations, leases, holds and hard pins (`kvstore.pool.pool`). After the owner's death, `adopt`
quarantines only pages that a process may still be writing, and frees all other pages that are not SEALED. If
several SEALED pages have one key, only the one used last stays.

The same table describes the slots of a slab file (`kvstore.ssd.slab`). There the machine may lose power
between a record and its data: `seal` is the xxh3-64 of key and checksums together, so a record that was half
written, or does not belong to its data, is detected when the data is read.

Each field has an array of its own, so that a scan over all pages reads only the fields that it needs.

Owns: per-page facts that outlive a process. Does not know: who uses a page.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from messenger.shm.catalogue import HINTS_PER_PAGE
from messenger.wire.checksums import CHECKSUM_BYTES
from mooncake.messages.blocks import KEY_BYTES, BlockKey

_ALIGNMENT = 64
"""The alignment of each array in bytes: a cache line."""
_GENERATIONS = 1 << 32
"""The number of generations, after which the count restarts at 0."""
_MOST_USES = (1 << 32) - 1
"""The largest number of uses that is counted."""
_NOBODY = 0
"""The value of the field `writer` for a page that only the table's owner writes."""
COPIER_SERIAL = (1 << 32) - 1
"""The serial number that stands for a messenger which copies to granted pages. No client has it."""

Array = np.ndarray[Any, np.dtype[Any]]


class PageState(IntEnum):
    """The states of a page. FREE is 0, so a zeroed table is an empty pool."""

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
# Integers, for code that runs for each page: members of an enum would take several times as long.
FREE, RESERVED, SEALED, QUARANTINED = map(int, PageState)
_STATES = tuple(PageState)
_ALLOWED = tuple(tuple(after in TRANSITIONS[before] for after in PageState) for before in PageState)


class PageWriter(NamedTuple):
    """A client that may have a page mapped for writing: its process id, and its serial number in the process.

    A messenger that copies to granted pages is such a writer too, with `COPIER_SERIAL`.
    """

    pid: int
    serial: int

    @classmethod
    def copier(cls, pid: int) -> "PageWriter":
        """Return the writer that stands for a messenger which copies to granted pages."""
        return cls(pid, COPIER_SERIAL)

    @property
    def is_copier(self) -> bool:
        return self.serial == COPIER_SERIAL


class Adopted(NamedTuple):
    """The pages of a table after the death of its owner. Pages in neither field are free now."""

    sealed: list[int]
    """Sealed pages, oldest use first."""
    quarantined: dict[int, PageWriter]
    """QUARANTINED pages, each with the process that may still be writing it."""


def table_fields(num_layers: int) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Return name, dtype and shape of each array, in their order in memory.

    The shape is that of one page's entry.
    """
    return [
        ("state", np.dtype("u1"), ()),
        ("generation", np.dtype("<u4"), ()),
        ("num_uses", np.dtype("<u4"), ()),  # in all tiers, since the block entered the first one
        ("position", np.dtype("<u4"), ()),  # index of the block in the reservation that stored it
        ("last_use", np.dtype("<u8"), ()),  # grows with every use of any page; 0: never sealed
        ("writer", np.dtype("<u8"), ()),  # pid and serial of a RESERVED page's writer; 0: nobody
        ("key", np.dtype(f"V{KEY_BYTES}"), ()),
        ("seal", np.dtype("<u8"), ()),
        ("checksums", np.dtype("<u8"), (num_layers,)),
        ("places", np.dtype("<u4"), (HINTS_PER_PAGE,)),  # hints, not by page: messenger.shm.catalogue
    ]


def record_bytes(num_layers: int) -> int:
    """Return the bytes that one page takes in a table."""
    return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in table_fields(num_layers))


def table_bytes(num_pages: int, num_layers: int) -> int:
    """Return the size of a table in bytes."""
    fields = table_fields(num_layers)
    return sum(_aligned(num_pages * dtype.itemsize * math.prod(shape)) for _, dtype, shape in fields)


def field_offsets(num_pages: int, num_layers: int) -> dict[str, int]:
    """Return the byte offset of each array in a table, by name."""
    offsets, end = {}, 0
    for name, dtype, shape in table_fields(num_layers):
        offsets[name] = end
        end += _aligned(num_pages * dtype.itemsize * math.prod(shape))
    return offsets


class PageTable:
    """A page table in memory, whose states change only along `TRANSITIONS`.

    `states`, `num_uses`, `positions` and `last_uses` may be read as arrays of length num_pages. `state_of`,
    `num_uses_of` and `last_use_of` are the same values as memoryviews, which are faster for a single page.
    """

    def __init__(self, buffer: "memoryview | bytearray", num_pages: int, num_layers: int) -> None:
        self.num_pages = num_pages
        self.num_layers = num_layers
        arrays: dict[str, Array] = {}
        offsets = field_offsets(num_pages, num_layers)
        for name, dtype, shape in table_fields(num_layers):
            count = num_pages * math.prod(shape)
            arrays[name] = np.frombuffer(buffer, dtype, count=count, offset=offsets[name])
        self._arrays = arrays
        self.states, self.state_of = arrays["state"], arrays["state"].data
        self.num_uses, self.num_uses_of = arrays["num_uses"], arrays["num_uses"].data
        self.last_uses, self.last_use_of = arrays["last_use"], arrays["last_use"].data
        self.positions = arrays["position"]
        self._generation = arrays["generation"].data
        self._writer = arrays["writer"].data
        self._seal = arrays["seal"].data
        self._keys = arrays["key"]
        self._key = arrays["key"].data.cast("B")
        self._checksums = arrays["checksums"].data.cast("B")

    @classmethod
    def in_memory(cls, num_pages: int, num_layers: int) -> Self:
        return cls(bytearray(table_bytes(num_pages, num_layers)), num_pages, num_layers)

    def state(self, page: int) -> PageState:
        return _STATES[self.state_of[page]]

    def generation(self, page: int) -> int:
        return self._generation[page]

    def key(self, page: int) -> BlockKey:
        return bytes(self._key[page * KEY_BYTES : (page + 1) * KEY_BYTES])

    def keys(self, pages: Array) -> list[BlockKey]:
        """Return the keys of many pages."""
        packed = self._keys[pages].tobytes()
        return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]

    def last_use(self, page: int) -> int:
        return self.last_use_of[page]

    def checksums(self, page: int, layers: range) -> bytes:
        """Return the little-endian xxh3-64 of each of `layers`, concatenated."""
        return bytes(self._checksums[self._checksum_bytes(page, layers)])

    def layer_checksums(self, pages: Array, layer: int) -> Array:
        """Return the xxh3-64 of one layer of many pages: uint64 `[n]`, a copy."""
        checksums: Array = self._arrays["checksums"].reshape(self.num_pages, self.num_layers)[pages, layer]
        return checksums

    def writer(self, page: int) -> PageWriter | None:
        """Return the process that may write this RESERVED page through its own mapping, or None."""
        writer = self._writer[page]
        return PageWriter(writer >> 32, writer & 0xFFFFFFFF) if writer != _NOBODY else None

    def is_intact(self, page: int) -> bool:
        """Return whether key and checksums of a page were written together."""
        return self._seal[page] == self._sealed_digest(page)

    def count(self) -> dict[PageState, int]:
        """Return the number of pages in each state."""
        counts = np.bincount(self.states, minlength=len(PageState)).tolist()
        return {state: counts[state] for state in PageState}

    def reserve(self, page: int, writer: PageWriter | None = None) -> None:
        """Reserve a FREE page.

        `writer` has the page mapped and is going to write it; None if only the table's owner writes it.
        """
        self.reserve_all([page], writer)

    def reserve_all(self, pages: Sequence[int], writer: PageWriter | None = None) -> None:
        """Reserve FREE pages, one after the other. `writer`: as for `reserve`."""
        number = writer.pid << 32 | writer.serial if writer is not None else _NOBODY
        state_of, writer_of = self.state_of, self._writer
        for page in pages:
            assert state_of[page] == FREE, f"page {page}: {_STATES[state_of[page]].name} -> RESERVED"
            writer_of[page] = number
            state_of[page] = RESERVED

    def set_checksums(self, page: int, layers: range, checksums: bytes) -> None:
        assert self.state_of[page] == RESERVED
        self._checksums[self._checksum_bytes(page, layers)] = checksums

    def seal(self, page: int, key: BlockKey, last_use: int, position: int = 0, num_uses: int = 1) -> None:
        """Seal a page whose data and checksums are complete."""
        self._key[page * KEY_BYTES : (page + 1) * KEY_BYTES] = key
        self._seal[page] = self._sealed_digest(page)
        self.last_use_of[page] = last_use
        self.positions[page] = position
        self.num_uses_of[page] = num_uses
        self._writer[page] = _NOBODY  # all of it is written; the page is only read from now on
        self._move(page, SEALED)

    def seal_all(
        self, pages: Sequence[int], keys: Sequence[BlockKey], first_use: int, positions: Sequence[int]
    ) -> None:
        """Seal many RESERVED pages whose data and checksums are complete, each with one use.

        `first_use` is the `last_use` of the first page, and each further page gets the next number.
        """
        index = np.asarray(pages, np.int64)
        assert np.all(self.states[index] == RESERVED)
        self._keys[index] = np.frombuffer(b"".join(keys), self._keys.dtype)
        self._arrays["seal"][index] = [self._sealed_digest(page) for page in pages]
        self.last_uses[index] = np.arange(first_use, first_use + len(pages))
        self.positions[index] = positions
        self.num_uses[index] = 1
        self._arrays["writer"][index] = _NOBODY
        self.states[index] = SEALED

    def use(self, page: int) -> None:
        """Count one more use of a page."""
        self.num_uses_of[page] = min(self.num_uses_of[page] + 1, _MOST_USES)

    def quarantine(self, page: int) -> None:
        self._move(page, QUARANTINED)

    def free(self, page: int) -> None:
        self._bump(page)
        self._move(page, FREE)

    def free_all(self, pages: Sequence[int]) -> None:
        """Free many pages, none of which is FREE, and increment their generations."""
        index = np.asarray(pages, np.int64)
        assert np.all(self.states[index] != FREE)
        self._arrays["generation"][index] += 1  # the dtype wraps around at _GENERATIONS
        self.states[index] = FREE

    def clear(self, page: int) -> None:
        """Set a page to FREE from any state."""
        if self.state_of[page] != FREE:
            self._bump(page)
            self.state_of[page] = FREE

    def copy(self) -> "PageTable":
        """Return a copy of the table in new memory."""
        copy = PageTable.in_memory(self.num_pages, self.num_layers)
        for name, array in self._arrays.items():
            copy._arrays[name][:] = array
        return copy

    def assign(self, writer: PageWriter) -> None:
        """Record, after the owner's death, that `writer` may be writing pages that are not complete.

        These are the pages that are RESERVED or QUARANTINED and have no writer yet.
        """
        others = (self.states != FREE) & (self.states != SEALED) & (self._arrays["writer"] == _NOBODY)
        self._arrays["writer"][others] = writer.pid << 32 | writer.serial

    def adopt(self) -> Adopted:
        """Adopt the table after the death of its owner, and return its contents.

        Pages with a writer are QUARANTINED, and the caller frees each of them when its writer is gone. Other
        pages that are not SEALED are freed. If several SEALED pages have one key, all but the one used last
        are freed.
        """
        pages = np.flatnonzero(self.states == SEALED)
        pages = pages[np.argsort(self.last_uses[pages], kind="stable")]
        by_key = dict(zip(self.keys(pages), pages.tolist(), strict=True))
        quarantined: dict[int, PageWriter] = {}
        for page in set(np.flatnonzero(self.states).tolist()).difference(by_key.values()):
            writer = self._writer[page]
            if self.state_of[page] == SEALED or writer == _NOBODY:
                self._bump(page)
                self.state_of[page] = FREE
            else:
                self.state_of[page] = QUARANTINED
                quarantined[page] = PageWriter(writer >> 32, writer & 0xFFFFFFFF)
        return Adopted(list(by_key.values()), quarantined)

    def _move(self, page: int, state: int) -> None:
        before = self.state_of[page]
        assert _ALLOWED[before][state], f"page {page}: {_STATES[before].name} -> {_STATES[state].name}"
        self.state_of[page] = state

    def _bump(self, page: int) -> None:
        self._generation[page] = (self._generation[page] + 1) % _GENERATIONS

    def _checksum_bytes(self, page: int, layers: range) -> slice:
        first = page * self.num_layers
        return slice((first + layers.start) * CHECKSUM_BYTES, (first + layers.stop) * CHECKSUM_BYTES)

    def _sealed_digest(self, page: int) -> int:
        checksums = self._checksums[self._checksum_bytes(page, range(self.num_layers))]
        return xxhash.xxh3_64_intdigest(self.key(page) + checksums)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
