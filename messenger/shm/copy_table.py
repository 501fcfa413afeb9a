"""The copy table of a shared segment: the open grants of its pages, and the peers that are copying to them.

A peer on the same host writes into granted pages itself, and tells their owner afterwards. The peer checks
the table, which lies in the segment, before it copies. The owner checks the table before it reuses the pages:
see copy_table.cpp. Each lane has a *copy slot* in the table. A grant that is closed during a copy is *quiet*
when that copy, or its process, has ended. Until then its pages are not reused: a process that is paused may
still copy when it goes on.

Copy slots outlive the owner's process, like the segment: peers may still be copying.

Owns: copy slots and open grants. Does not know: pages, connections.
"""

import asyncio
import functools
import logging
import os
import secrets
import select
import weakref
from collections.abc import Callable, Mapping
from ctypes import CDLL, c_char_p, c_int, c_size_t, c_ssize_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

from messenger.native import SOURCES
from messenger.wire.checksums import address_of
from mooncake.native import load_or_do_without

log = logging.getLogger(__name__)

COPY_TABLE_BYTES = 2048
"""Bytes of the table in the segment: 16 bytes for each slot, 8 bytes for each open grant.

copy_table.cpp asserts this size.
"""
NUM_COPY_SLOTS = 64
"""The slots of a table: one bit each in the masks of copy_table.cpp."""
_PID_BITS, _SERIAL_BITS = 32, 31
_PID_MASK = (1 << _PID_BITS) - 1
_FIRST_LOOK_S = 0.001
"""Seconds until the first check whether a copy has ended: about the time of a copy of 4 MiB."""
_LONGEST_PAUSE_S = 0.05
"""Seconds of the longest pause between two checks. The copy of a process that is paused may take hours."""


@functools.cache
def native() -> CDLL | None:
    """Return the compiled code; None without a compiler: then no copy slot is used."""
    library = load_or_do_without(
        SOURCES / "copy_table.cpp", "blocks from this host are copied by who receives them"
    )
    if library is None:
        return None
    library.open_grant.argtypes = (c_void_p, c_uint64)
    library.close_grant.argtypes = (c_void_p, c_uint64)
    library.close_all.argtypes = (c_void_p,)
    library.is_copying.argtypes = (c_void_p, c_size_t, c_uint64)
    library.owner_of.argtypes = library.copied_to.argtypes = (c_void_p, c_size_t)
    library.give_slot.argtypes = (c_void_p, c_size_t, c_uint64)
    library.is_vacant.argtypes = (c_void_p, c_size_t)
    library.occupy_slot.argtypes = (c_void_p, c_size_t, c_uint64)
    library.leave_slot.argtypes = (c_void_p, c_size_t)
    library.place.argtypes = (
        c_void_p,
        c_size_t,
        c_uint64,
        c_void_p,
        c_void_p,
        c_char_p,
        c_size_t,
        c_size_t,
        c_char_p,
        c_int,
        c_char_p,
        c_size_t,
    )
    library.open_grant.restype = library.is_copying.restype = c_int
    library.place.restype = c_ssize_t
    library.is_vacant.restype = library.occupy_slot.restype = c_int
    library.close_grant.restype = library.close_all.restype = c_uint64
    library.owner_of.restype = library.copied_to.restype = c_uint64
    library.give_slot.restype = library.leave_slot.restype = None
    return library


class Copy(NamedTuple):
    """A copy in progress."""

    slot: int
    grant_id: int


@dataclass(slots=True)
class _Awaited:
    """The copies to closed grants whose end is awaited."""

    copies: list[Copy]
    on_quiet: Callable[[], None]


class CopyTable:
    """The owner's side of the copy table.

    At first no grant is open, and slots of an earlier life are taken.
    """

    def __init__(self, library: CDLL, copy_table: memoryview) -> None:
        """Open a table in `copy_table`: COPY_TABLE_BYTES bytes, zeros in a new segment."""
        assert len(copy_table) == COPY_TABLE_BYTES
        self._native = library
        self._copy_table = copy_table  # keeps it mapped
        self._address = address_of(copy_table)
        self._processes: dict[int, int | None] = {}
        """Descriptors of the processes in taken slots, by slot; None if the process has ended."""
        weakref.finalize(self, _close_all, self._processes)
        self._unwatched: set[int] = set()
        """Slots of an earlier life whose processes cannot be watched."""
        self._left: set[int] = set()
        """Slots whose lanes have ended, but which their processes may not have left yet."""
        self._has_warned = False
        self._awaited: list[_Awaited] = []
        self._looking: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_LOOK_S
        busy = library.close_all(self._address)
        owners = [self.token(slot) & _PID_MASK for slot in range(NUM_COPY_SLOTS)]
        self._former: dict[int, list[Copy]] = {}
        """Copies that peers of the earlier life had in progress when this life began, by process id."""
        for slot in _slots_of(busy):
            grant_id = library.copied_to(self._address, slot) - 1
            if owners[slot] and grant_id >= 0:
                self._former.setdefault(owners[slot], []).append(Copy(slot, grant_id))
        for slot, owner in enumerate(owners):
            if owner:
                self._take_over(slot, owner)

    @classmethod
    def at(cls, copy_table: memoryview) -> "CopyTable | None":
        """Return the opened table; None if the code cannot be compiled."""
        library = native()
        return None if library is None else cls(library, copy_table)

    # -- slots ------------------------------------------------------------------------------------

    def take_slot(self, pid: int) -> int | None:
        """Return a slot for a lane of the process `pid`.

        Returns None if all slots are taken, or if the process cannot be watched, so that its end would not be
        noticed.
        """
        slot = next((slot for slot in range(NUM_COPY_SLOTS) if self._is_free(slot)), None)
        if slot is None:
            return None
        try:
            process = _watch(pid)
        except OSError as error:
            if not self._has_warned:
                log.warning("blocks from process %d are copied here: it cannot be watched: %s", pid, error)
            self._has_warned = True
            return None
        if process is None:
            return None
        self._processes[slot] = process
        self._native.give_slot(self._address, slot, secrets.randbits(_SERIAL_BITS) << _PID_BITS | pid)
        return slot

    def token(self, slot: int) -> int:
        """Return the token by which the process of a slot occupies it. Its lowest bits are the process id."""
        return int(self._native.owner_of(self._address, slot))

    def _take_over(self, slot: int, owner: int) -> None:
        """Take over a slot of an earlier life.

        A slot whose process cannot be watched is not used again in this life.
        """
        try:
            self._processes[slot] = _watch(owner)
        except OSError as error:
            log.warning("slot %d is kept aside: process %d cannot be watched: %s", slot, owner, error)
            self._unwatched.add(slot)
        else:
            self.leave(slot)

    def leave(self, slot: int) -> None:
        """Record that a lane has ended.

        Its slot becomes free when its process has left the slot, has ended, or has never occupied the slot.
        """
        self._left.add(slot)
        self._look_soon()

    # -- grants -----------------------------------------------------------------------------------

    def open(self, grant_id: int) -> bool:
        """Open a grant to copiers. Returns whether the table had a free entry for the grant."""
        return bool(self._native.open_grant(self._address, grant_id))

    def close(self, grant_id: int, on_quiet: Callable[[], None]) -> bool:
        """Close a grant, so that no copy to it begins any more.

        Returns True if no copy is in progress; otherwise `on_quiet` is called when all copies have ended.
        """
        busy = self._native.close_grant(self._address, grant_id)
        copies = [Copy(slot, grant_id) for slot in _slots_of(busy)]
        if copies:
            self._await(copies, on_quiet)
        return not copies

    # -- of an earlier life -----------------------------------------------------------------------

    @property
    def former_copiers(self) -> list[int]:
        """The ids of the processes that were copying to the pages when this life began."""
        return list(self._former)

    def await_former(self, pid: int, on_quiet: Callable[[], None]) -> None:
        """Call `on_quiet` when all copies of the earlier life's process `pid` have ended.

        The end of the process ends its copies.
        """
        self._await(self._former.get(pid, []), on_quiet)

    # ---------------------------------------------------------------------------------------------

    def _await(self, copies: list[Copy], on_quiet: Callable[[], None]) -> None:
        self._awaited.append(_Awaited(copies, on_quiet))
        self._look_soon()

    def _look_soon(self) -> None:
        self._pause_s = _FIRST_LOOK_S
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        """Check whether awaited copies and processes have ended."""
        self._looking = None
        awaited, self._awaited = self._awaited, []
        for each in awaited:
            each.copies = [copy for copy in each.copies if self._is_in_flight(copy)]
            if each.copies:
                self._awaited.append(each)
            else:
                each.on_quiet()
        for slot in list(self._left):
            if self._native.is_vacant(self._address, slot) or self._has_ended(slot):
                self._free(slot)
        if self._awaited or self._left:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._looking = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _is_in_flight(self, copy: Copy) -> bool:
        is_copying = self._native.is_copying(self._address, copy.slot, copy.grant_id)
        return bool(is_copying) and not self._has_ended(copy.slot)

    def _has_ended(self, slot: int) -> bool:
        """Return whether the process of a slot has ended, as far as can be seen."""
        if slot in self._unwatched:
            return False
        process = self._processes.get(slot)
        return process is None or _is_over(process)

    def _is_free(self, slot: int) -> bool:
        return slot not in self._processes and slot not in self._unwatched

    def _free(self, slot: int) -> None:
        self._left.discard(slot)
        process = self._processes.pop(slot)
        if process is not None:
            os.close(process)
        self._native.give_slot(self._address, slot, 0)


def _close_all(processes: Mapping[int, int | None]) -> None:
    for process in processes.values():
        if process is not None:
            os.close(process)


def _slots_of(mask: int) -> list[int]:
    return [slot for slot in range(NUM_COPY_SLOTS) if mask >> slot & 1]


def _watch(pid: int) -> int | None:
    """Return a descriptor of the process; None if there is no such process here.

    Raises OSError if it cannot be watched.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _is_over(process: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(0))
