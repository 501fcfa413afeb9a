"""Who copies to which granted pages of a shared segment, and when they are quiet."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from messenger.shm.board import BOARD_BYTES, NUM_SEATS, Board
from messenger.shm.shared_pages import SharedPages
from messenger.wire.checksums import layer_checksums
from messenger.wire.messages import Seat, Write, WriteEntry
from mooncake.errors import TransferError
from tests.messenger.fabric import LARGE, until

GRANT = 1 << 60
PAGE_BYTES = LARGE.block_bytes
NUM_PAGES = 3


class Segment:
    """Pages, a board behind them, and what is written there."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(NUM_PAGES * PAGE_BYTES + BOARD_BYTES))
        self.words = self.buffer[-BOARD_BYTES:].cast("Q")
        self.source = memoryview(bytearray(np.random.default_rng(3).bytes(PAGE_BYTES)))
        self.entry = WriteEntry(1, 1, 0, 4, layer_checksums(self.source, LARGE.layer_bytes), 0)

    def board(self) -> Board:
        board = Board.at(self.buffer[-BOARD_BYTES:])
        assert board is not None
        return board

    def pages(self, number: int) -> SharedPages:
        """Of whoever sits down there."""
        seat = Seat(
            number, self.words[2 * number + 1], len(self.buffer) - BOARD_BYTES, 0, PAGE_BYTES, NUM_PAGES
        )
        return SharedPages(self.buffer, seat, LARGE, self.source)

    def page(self, page: int) -> memoryview:
        return self.buffer[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]

    def is_copying(self, seat: int, grant_id: int | None) -> None:
        """As whoever sits there says."""
        self.words[2 * seat] = 0 if grant_id is None else grant_id + 1


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def taken(board: Board, pid: int) -> int:
    seat = board.take_seat(pid)
    assert seat is not None
    return seat


def test_what_is_granted_can_be_written_until_the_grant_is_closed() -> None:
    segment = Segment()
    board, write = segment.board(), Write(1, GRANT, [segment.entry])
    pages = segment.pages(taken(board, os.getpid()))
    assert pages.place(write, LARGE.layer_bytes) is None
    assert board.open(GRANT)
    assert not board.open(GRANT)
    assert pages.place(write, LARGE.layer_bytes) == 0
    assert segment.page(1) == segment.source
    assert segment.page(0) == segment.page(2) == bytes(PAGE_BYTES)
    segment.page(1)[:] = bytes(PAGE_BYTES)
    assert board.close(GRANT, lambda: None)
    assert pages.place(write, LARGE.layer_bytes) is None
    assert segment.page(1) == bytes(PAGE_BYTES)


@pytest.mark.parametrize("grant_id", [-1, (1 << 64) - 1])
def test_a_grant_that_there_cannot_be_is_not_open(grant_id: int) -> None:
    segment = Segment()
    pages = segment.pages(taken(segment.board(), os.getpid()))
    assert pages.place(Write(1, grant_id, [segment.entry]), LARGE.layer_bytes) is None
    assert segment.page(1) == bytes(PAGE_BYTES)


def test_layers_of_several_pages_are_one_write_and_damage_is_found() -> None:
    segment = Segment()
    board, size = segment.board(), LARGE.layer_bytes
    pages = segment.pages(taken(board, os.getpid()))
    board.open(GRANT)
    checksums = segment.entry.checksums
    entries = [WriteEntry(0, 1, 3, 4, checksums[:8], 0), WriteEntry(2, 1, 0, 2, checksums[8:24], size)]
    assert pages.place(Write(1, GRANT, entries), size) == 0
    assert segment.page(0)[3 * size :] == segment.source[:size]
    assert segment.page(2)[: 2 * size] == segment.source[size : 3 * size]
    segment.source[2 * size] ^= 1
    assert pages.place(Write(1, GRANT, entries), size) is None


def test_a_word_is_sent_when_all_bytes_are_there_and_only_then() -> None:
    segment = Segment()
    board, write = segment.board(), Write(1, GRANT, [segment.entry])
    pages = segment.pages(taken(board, os.getpid()))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        assert pages.place(write, LARGE.layer_bytes, ours.fileno(), b"there") is None
        with pytest.raises(BlockingIOError):
            theirs.recv(10)
        board.open(GRANT)
        assert pages.place(write, LARGE.layer_bytes, ours.fileno(), b"there") == 5
        assert theirs.recv(10) == b"there"
        theirs.close()
        assert pages.place(write, LARGE.layer_bytes, ours.fileno(), b"there") == 0
    assert segment.page(1) == segment.source


@pytest.mark.parametrize(
    "entry",
    [
        WriteEntry(NUM_PAGES, 1, 0, 1, bytes(8), 0),
        WriteEntry(-1, 1, 0, 1, bytes(8), 0),
        WriteEntry(0, 1, 3, 5, bytes(16), 0),
        WriteEntry(0, 1, -1, 1, bytes(16), 0),
        WriteEntry(0, 1, 2, 2, b"", 0),
        WriteEntry(0, 1, 0, 1, bytes(7), 0),
        WriteEntry(0, 1, 0, 1, bytes(8), PAGE_BYTES),
    ],
)
def test_what_fits_no_page_is_left_to_the_receiver(entry: WriteEntry) -> None:
    segment = Segment()
    board = segment.board()
    board.open(GRANT)
    pages = segment.pages(taken(board, os.getpid()))
    assert pages.place(Write(1, GRANT, [entry]), LARGE.layer_bytes) is None
    assert segment.buffer[: NUM_PAGES * PAGE_BYTES] == bytes(NUM_PAGES * PAGE_BYTES)


@pytest.mark.parametrize(
    "seat",
    [
        Seat(NUM_SEATS, 1, 0, BOARD_BYTES, PAGE_BYTES, 1),
        Seat(0, 1, 1, BOARD_BYTES, PAGE_BYTES, 1),
        Seat(0, 1, 1 << 40, 0, PAGE_BYTES, 1),
        Seat(0, 1, 0, 0, PAGE_BYTES, 1 << 40),
        Seat(0, 1, 0, BOARD_BYTES, PAGE_BYTES - 1, 1),
    ],
)
def test_a_seat_outside_the_segment_is_not_taken(seat: Seat) -> None:
    segment = Segment()
    with pytest.raises(TransferError, match="cannot be taken"):
        SharedPages(segment.buffer, seat, LARGE, segment.source)


async def test_a_grant_is_quiet_when_the_copies_to_it_have_ended(other: subprocess.Popen[bytes]) -> None:
    segment = Segment()
    board, quiet = segment.board(), asyncio.Event()
    idle, copier, busy_elsewhere = (taken(board, other.pid) for _ in range(3))
    assert len({idle, copier, busy_elsewhere}) == 3
    board.open(GRANT)
    segment.pages(copier)
    segment.is_copying(copier, GRANT)
    segment.is_copying(busy_elsewhere, GRANT + 1)
    assert not board.close(GRANT, quiet.set)
    other.send_signal(signal.SIGSTOP)
    board.leave(copier)  # its connection is lost: that says nothing
    await looked_at(board)
    assert not quiet.is_set()
    segment.is_copying(copier, None)
    await until(quiet.is_set)


async def test_a_grant_is_quiet_when_its_copier_is_dead(other: subprocess.Popen[bytes]) -> None:
    segment = Segment()
    board, quiet = segment.board(), asyncio.Event()
    seat = taken(board, other.pid)
    board.open(GRANT)
    segment.is_copying(seat, GRANT)
    assert not board.close(GRANT, quiet.set)
    await looked_at(board)
    assert not quiet.is_set()
    other.kill()  # not waited for yet
    await until(quiet.is_set)
    board.leave(seat)
    await until(lambda: board.take_seat(os.getpid()) == seat)


async def test_a_seat_is_given_again_when_its_lane_has_ended_at_both_sides(
    other: subprocess.Popen[bytes],
) -> None:
    segment = Segment()
    board = segment.board()
    seats = [taken(board, other.pid) for _ in range(NUM_SEATS)]
    assert sorted(seats) == list(range(NUM_SEATS))
    assert board.take_seat(other.pid) is None
    pages = segment.pages(5)
    board.leave(5)
    await looked_at(board)
    assert board.take_seat(other.pid) is None
    pages.leave()
    await until(lambda: board.take_seat(other.pid) == 5)


async def test_a_seat_that_nobody_took_is_given_again_and_its_ticket_is_worth_nothing(
    other: subprocess.Popen[bytes],
) -> None:
    """Whoever it was for gave up before he heard of it."""
    segment = Segment()
    board = segment.board()
    seat = taken(board, other.pid)
    late = Seat(seat, board.ticket(seat), len(segment.buffer) - BOARD_BYTES, 0, PAGE_BYTES, NUM_PAGES)
    board.leave(seat)
    await until(lambda: board.take_seat(other.pid) == seat)
    with pytest.raises(TransferError, match="given up meanwhile"):
        SharedPages(segment.buffer, late, LARGE, segment.source)
    segment.pages(seat)


async def test_those_who_were_copying_when_the_owner_died_are_found(other: subprocess.Popen[bytes]) -> None:
    segment = Segment()
    former = segment.board()
    former.open(GRANT)
    seats = [taken(former, other.pid) for _ in range(2)]
    pages = [segment.pages(seat) for seat in seats]
    segment.is_copying(seats[1], GRANT)

    board, quiet = segment.board(), asyncio.Event()
    assert board.former_copiers == [other.pid]
    board.await_former(other.pid, quiet.set)
    await looked_at(board)
    assert not quiet.is_set()
    write = Write(1, GRANT, [segment.entry])
    assert pages[0].place(write, LARGE.layer_bytes) is None
    assert board.take_seat(os.getpid()) not in seats
    other.kill()
    await until(quiet.is_set)
    await until(lambda: board.take_seat(os.getpid()) in seats)


def test_a_copy_of_an_earlier_life_is_over_when_its_seat_says_so() -> None:
    """However long its process lives, and whether that can be watched or not."""

    async def test(pid: int) -> None:
        segment = Segment()
        former = segment.board()
        seats = [taken(former, os.getpid()) for _ in range(2)]
        for seat in seats:
            segment.words[2 * seat + 1] = 1 << 63 | pid  # who sits there
            segment.is_copying(seat, GRANT)
        board, quiet = segment.board(), asyncio.Event()
        board.await_former(pid, quiet.set)
        segment.is_copying(seats[0], None)
        await looked_at(board)
        assert not quiet.is_set()
        segment.is_copying(seats[1], GRANT + 1)  # it has gone on to another
        await until(quiet.is_set)

    asyncio.run(test(os.getpid()))
    has_ended = threading.Event()
    thread = threading.Thread(target=has_ended.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        asyncio.run(test(thread.native_id))
    finally:
        has_ended.set()
        thread.join()


async def test_a_copier_that_has_left_meanwhile_is_not_awaited(other: subprocess.Popen[bytes]) -> None:
    segment = Segment()
    former = segment.board()
    seat = taken(former, other.pid)
    segment.is_copying(seat, GRANT)
    segment.pages(seat).leave()
    board, quiet = segment.board(), asyncio.Event()
    assert board.former_copiers == []
    board.await_former(other.pid, quiet.set)
    await until(quiet.is_set)


def test_a_former_process_that_cannot_be_watched_costs_its_seat_alone() -> None:
    """Its number may be a thread's by now."""

    async def test(thread_id: int) -> None:
        segment = Segment()
        former = segment.board()
        seat = taken(former, os.getpid())
        segment.words[2 * seat + 1] = thread_id
        board = segment.board()
        seats = [taken(board, os.getpid()) for _ in range(NUM_SEATS - 1)]
        assert seat not in seats
        assert board.take_seat(os.getpid()) is None

    has_ended = threading.Event()
    thread = threading.Thread(target=has_ended.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        asyncio.run(test(thread.native_id))
    finally:
        has_ended.set()
        thread.join()


def test_a_process_that_cannot_be_watched_has_no_seat_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_ended = threading.Event()
    thread = threading.Thread(target=has_ended.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        board = Segment().board()
        assert [board.take_seat(thread.native_id) for _ in range(3)] == [None] * 3
        assert caplog.text.count("cannot be watched") == 1
    finally:
        has_ended.set()
        thread.join()


async def test_nothing_is_written_to_a_page_after_its_grant_is_quiet() -> None:
    """A thread copies as fast as it can while the grant comes and goes."""
    segment = Segment()
    board = segment.board()
    pages, write = segment.pages(taken(board, os.getpid())), Write(1, GRANT, [segment.entry])
    has_ended, num_placed = threading.Event(), 0

    def copy() -> None:
        nonlocal num_placed
        while not has_ended.is_set():
            num_placed += pages.place(write, LARGE.layer_bytes) is not None

    thread = threading.Thread(target=copy)
    thread.start()
    page = np.frombuffer(segment.page(1), np.uint8)
    num_busy = 0
    try:
        for _ in range(100):
            before, quiet = num_placed, asyncio.Event()
            assert board.open(GRANT)
            await until(lambda before=before: num_placed > before)  # type: ignore[misc]
            if not board.close(GRANT, quiet.set):
                num_busy += 1
                await until(quiet.is_set)
            page[:] = 7  # somebody else's now
            for _ in range(3):
                assert np.all(page == 7)
    finally:
        has_ended.set()
        thread.join()
    assert num_busy


async def looked_at(board: Board) -> None:
    """It has looked at its seats twice."""
    for _ in range(2):
        looking = board._looking
        await until(lambda looking=looking: board._looking is not looking)  # type: ignore[misc]
