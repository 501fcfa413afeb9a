"""The board of a shared segment: which grants its pages are open for, and who is copying to them right now.

Whoever is on the same host writes into granted pages himself, and says so afterwards. The board, which lies
in the segment, is where he looks before he does, and where the owner of the pages looks before it uses them
for something else: see board.cpp. Each lane has a *seat* there. A grant that is closed under a copy is quiet
when that copy has ended, or its process has: a process that has been stopped keeps the pages aside.

The seats outlive the owner's process as the segment does: whoever sat there then may be copying still.

Owns: seats and open grants. Does not know: pages, connections.
"""

import asyncio
import functools
import logging
import os
import secrets
import select
from collections.abc import Callable
from ctypes import CDLL, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from messenger.checksums import address_of
from mooncake.native import load_or_do_without

log = logging.getLogger(__name__)

BOARD_BYTES = 2048
NUM_SEATS = 64
_PID_BITS, _SERIAL_BITS = 32, 31
_PID_MASK = (1 << _PID_BITS) - 1
_FIRST_LOOK_S = 0.001
_LONGEST_PAUSE_S = 0.05


@functools.cache
def native() -> CDLL | None:
    """What looks at boards, and copies; None where there is no compiler: then nobody sits there."""
    library = load_or_do_without(
        Path(__file__).with_suffix(".cpp"), "blocks from this host are copied by who receives them"
    )
    if library is None:
        return None
    library.open_grant.argtypes = (c_void_p, c_uint64)
    library.close_grant.argtypes = (c_void_p, c_uint64)
    library.close_all.argtypes = (c_void_p,)
    library.is_copying.argtypes = (c_void_p, c_size_t, c_uint64)
    library.owner_of.argtypes = (c_void_p, c_size_t)
    library.give_seat.argtypes = (c_void_p, c_size_t, c_uint64)
    library.is_vacant.argtypes = (c_void_p, c_size_t)
    library.sit_down.argtypes = (c_void_p, c_size_t, c_uint64)
    library.leave_seat.argtypes = (c_void_p, c_size_t)
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
    )
    library.open_grant.restype = library.is_copying.restype = library.place.restype = c_int
    library.is_vacant.restype = library.sit_down.restype = c_int
    library.close_grant.restype = library.close_all.restype = library.owner_of.restype = c_uint64
    library.give_seat.restype = library.leave_seat.restype = None
    return library


@dataclass(slots=True)
class _Closing:
    """A grant that was closed while somebody was copying to it."""

    grant_id: int
    seats: list[int]
    on_quiet: Callable[[], None]


class Board:
    """The owner's side. Nothing is open at first; who has seats since an earlier life keeps them for now."""

    def __init__(self, library: CDLL, board: memoryview) -> None:
        """`board`: BOARD_BYTES, zeros when they are new."""
        assert len(board) == BOARD_BYTES
        self._native = library
        self._board = board  # keeps it mapped
        self._address = address_of(board)
        self._processes: dict[int, int | None] = {}
        """by seat that is taken: a descriptor of its process, None if that has ended or cannot be watched"""
        self._left: set[int] = set()
        """seats whose lane has ended, and which may not have been left yet"""
        self._has_warned = False
        self._closing: list[_Closing] = []
        self._looking: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_LOOK_S
        busy = library.close_all(self._address)
        owners = [self.ticket(seat) & _PID_MASK for seat in range(NUM_SEATS)]
        self.former_copiers = [owners[seat] for seat in _seats_of(busy) if owners[seat]]
        """processes that were copying to pages of an earlier life when this one began"""
        for seat, owner in enumerate(owners):
            if owner:
                self._take_over(seat, owner)

    @classmethod
    def at(cls, board: memoryview) -> "Board | None":
        """None where nothing can be compiled."""
        library = native()
        return None if library is None else cls(library, board)

    # -- seats ------------------------------------------------------------------------------------

    def take_seat(self, pid: int) -> int | None:
        """For a lane of this process; None if all are taken, or it cannot be seen from here when it ends."""
        seat = next((seat for seat in range(NUM_SEATS) if seat not in self._processes), None)
        if seat is None:
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
        self._processes[seat] = process
        self._native.give_seat(self._address, seat, secrets.randbits(_SERIAL_BITS) << _PID_BITS | pid)
        return seat

    def ticket(self, seat: int) -> int:
        """With which whoever the seat was given to sits down. Which process that is are its lowest bits."""
        return int(self._native.owner_of(self._address, seat))

    def _take_over(self, seat: int, owner: int) -> None:
        """From an earlier life. If nobody can say when the owner ends it is not given again in this one."""
        try:
            self._processes[seat] = _watch(owner)
        except OSError as error:
            log.warning("seat %d is kept aside: process %d cannot be watched: %s", seat, owner, error)
            self._processes[seat] = None
        else:
            self.leave(seat)

    def leave(self, seat: int) -> None:
        """The lane has ended: its seat is free when the process has left it too, has not taken it, or has
        ended."""
        self._left.add(seat)
        self._look_soon()

    # -- grants -----------------------------------------------------------------------------------

    def open(self, grant_id: int) -> bool:
        """Whether it could be: there are fewer places than grants may be."""
        return bool(self._native.open_grant(self._address, grant_id))

    def close(self, grant_id: int, on_quiet: Callable[[], None]) -> bool:
        """Nobody begins to copy to it any more. Whether nobody is copying to it: else `on_quiet` is called
        when that has ended."""
        seats = _seats_of(self._native.close_grant(self._address, grant_id))
        if not seats:
            return True
        self._closing.append(_Closing(grant_id, seats, on_quiet))
        self._look_soon()
        return False

    def shut_down(self) -> None:
        """Nobody looks any more; what is not quiet now is left as it is."""
        if self._looking is not None:
            self._looking.cancel()
        for process in self._processes.values():
            if process is not None:
                os.close(process)
        self._processes.clear()

    # ---------------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        self._pause_s = _FIRST_LOOK_S
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        """Whether those have ended that are awaited."""
        self._looking = None
        closing, self._closing = self._closing, []
        for each in closing:
            each.seats = [seat for seat in each.seats if self._is_copying(seat, each.grant_id)]
            if each.seats:
                self._closing.append(each)
            else:
                each.on_quiet()
        for seat in list(self._left):
            if self._native.is_vacant(self._address, seat) or self._has_ended(seat):
                self._free(seat)
        if self._closing or self._left:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._looking = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _is_copying(self, seat: int, grant_id: int) -> bool:
        is_copying = self._native.is_copying(self._address, seat, grant_id)
        return bool(is_copying) and not self._has_ended(seat)

    def _has_ended(self, seat: int) -> bool:
        """Whether the process has that sits there."""
        process = self._processes.get(seat)
        return process is None or _is_over(process)

    def _free(self, seat: int) -> None:
        self._left.discard(seat)
        process = self._processes.pop(seat)
        if process is not None:
            os.close(process)
        self._native.give_seat(self._address, seat, 0)


def _seats_of(mask: int) -> list[int]:
    return [seat for seat in range(NUM_SEATS) if mask >> seat & 1]


def _watch(pid: int) -> int | None:
    """A descriptor of the process; None if there is no such process here. Raises OSError if there is."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _is_over(process: int) -> bool:
    """Whether it has ended, waited for or not."""
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(0))
