"""Who copies to which granted pages of a shared segment, and when they are quiet."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from messenger.shm.copy_table import COPY_TABLE_BYTES, NUM_COPY_SLOTS, CopyTable
from messenger.shm.shared_pages import SharedPages
from messenger.wire.checksums import layer_checksums
from messenger.wire.messages import CopySlot, Write, WriteEntry
from mooncake.errors import TransferError
from tests.messenger.fabric import LARGE, until

GRANT = 1 << 60
PAGE_BYTES = LARGE.block_bytes
NUM_PAGES = 3


@contextlib.contextmanager
def parked_thread() -> Iterator[int]:
    """The id of a thread that does nothing. It is no process, so it cannot be watched."""
    has_ended = threading.Event()
    thread = threading.Thread(target=has_ended.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        yield thread.native_id
    finally:
        has_ended.set()
        thread.join()


class Segment:
    """Pages, a copy_table behind them, and what is written there."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(NUM_PAGES * PAGE_BYTES + COPY_TABLE_BYTES))
        self.words = self.buffer[-COPY_TABLE_BYTES:].cast("Q")
        self.source = memoryview(bytearray(np.random.default_rng(3).bytes(PAGE_BYTES)))
        self.entry = WriteEntry(1, 1, 0, 4, layer_checksums(self.source, LARGE.layer_bytes), 0)

    def copy_table(self) -> CopyTable:
        copy_table = CopyTable.at(self.buffer[-COPY_TABLE_BYTES:])
        assert copy_table is not None
        return copy_table

    def pages(self, number: int) -> SharedPages:
        """Of whoever sits down there."""
        slot = CopySlot(
            number, self.words[2 * number + 1], len(self.buffer) - COPY_TABLE_BYTES, 0, PAGE_BYTES, NUM_PAGES
        )
        return SharedPages(self.buffer, slot, LARGE, self.source)

    def page(self, page: int) -> memoryview:
        return self.buffer[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]

    def is_copying(self, slot: int, grant_id: int | None) -> None:
        """As whoever sits there says."""
        self.words[2 * slot] = 0 if grant_id is None else grant_id + 1


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


def taken(copy_table: CopyTable, pid: int) -> int:
    slot = copy_table.take_slot(pid)
    assert slot is not None
    return slot


def test_what_is_granted_can_be_written_until_the_grant_is_closed() -> None:
    segment = Segment()
    copy_table, write = segment.copy_table(), Write(1, GRANT, [segment.entry])
    pages = segment.pages(taken(copy_table, os.getpid()))
    assert pages.place(write, LARGE.layer_bytes) is None
    assert copy_table.open(GRANT)
    assert not copy_table.open(GRANT)
    assert pages.place(write, LARGE.layer_bytes) == 0
    assert segment.page(1) == segment.source
    assert segment.page(0) == segment.page(2) == bytes(PAGE_BYTES)
    segment.page(1)[:] = bytes(PAGE_BYTES)
    assert copy_table.close(GRANT, lambda: None)
    assert pages.place(write, LARGE.layer_bytes) is None
    assert segment.page(1) == bytes(PAGE_BYTES)


@pytest.mark.parametrize("grant_id", [-1, (1 << 64) - 1])
def test_a_grant_that_there_cannot_be_is_not_open(grant_id: int) -> None:
    segment = Segment()
    pages = segment.pages(taken(segment.copy_table(), os.getpid()))
    assert pages.place(Write(1, grant_id, [segment.entry]), LARGE.layer_bytes) is None
    assert segment.page(1) == bytes(PAGE_BYTES)


def test_layers_of_several_pages_are_one_write_and_damage_is_found() -> None:
    segment = Segment()
    copy_table, size = segment.copy_table(), LARGE.layer_bytes
    pages = segment.pages(taken(copy_table, os.getpid()))
    copy_table.open(GRANT)
    checksums = segment.entry.checksums
    entries = [WriteEntry(0, 1, 3, 4, checksums[:8], 0), WriteEntry(2, 1, 0, 2, checksums[8:24], size)]
    assert pages.place(Write(1, GRANT, entries), size) == 0
    assert segment.page(0)[3 * size :] == segment.source[:size]
    assert segment.page(2)[: 2 * size] == segment.source[size : 3 * size]
    segment.source[2 * size] ^= 1
    assert pages.place(Write(1, GRANT, entries), size) is None


def test_a_word_is_sent_when_all_bytes_are_there_and_only_then() -> None:
    segment = Segment()
    copy_table, write = segment.copy_table(), Write(1, GRANT, [segment.entry])
    pages = segment.pages(taken(copy_table, os.getpid()))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        assert pages.place(write, LARGE.layer_bytes, ours.fileno(), b"there") is None
        with pytest.raises(BlockingIOError):
            theirs.recv(10)
        copy_table.open(GRANT)
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
    copy_table = segment.copy_table()
    copy_table.open(GRANT)
    pages = segment.pages(taken(copy_table, os.getpid()))
    assert pages.place(Write(1, GRANT, [entry]), LARGE.layer_bytes) is None
    assert segment.buffer[: NUM_PAGES * PAGE_BYTES] == bytes(NUM_PAGES * PAGE_BYTES)


@pytest.mark.parametrize(
    "slot",
    [
        CopySlot(NUM_COPY_SLOTS, 1, 0, COPY_TABLE_BYTES, PAGE_BYTES, 1),
        CopySlot(0, 1, 1, COPY_TABLE_BYTES, PAGE_BYTES, 1),
        CopySlot(0, 1, 1 << 40, 0, PAGE_BYTES, 1),
        CopySlot(0, 1, 0, 0, PAGE_BYTES, 1 << 40),
        CopySlot(0, 1, 0, COPY_TABLE_BYTES, PAGE_BYTES - 1, 1),
    ],
)
def test_a_slot_outside_the_segment_is_not_taken(slot: CopySlot) -> None:
    segment = Segment()
    with pytest.raises(TransferError, match="cannot be taken"):
        SharedPages(segment.buffer, slot, LARGE, segment.source)


async def test_a_grant_is_quiet_when_the_copies_to_it_have_ended(other: subprocess.Popen[bytes]) -> None:
    segment = Segment()
    copy_table, quiet = segment.copy_table(), asyncio.Event()
    idle, copier, busy_elsewhere = (taken(copy_table, other.pid) for _ in range(3))
    assert len({idle, copier, busy_elsewhere}) == 3
    copy_table.open(GRANT)
    segment.pages(copier)
    segment.is_copying(copier, GRANT)
    segment.is_copying(busy_elsewhere, GRANT + 1)
    assert not copy_table.close(GRANT, quiet.set)
    other.send_signal(signal.SIGSTOP)
    copy_table.leave(copier)  # its connection is lost: that says nothing
    await looked_at(copy_table)
    assert not quiet.is_set()
    segment.is_copying(copier, None)
    await until(quiet.is_set)


async def test_a_grant_is_quiet_when_its_copier_is_dead(other: subprocess.Popen[bytes]) -> None:
    segment = Segment()
    copy_table, quiet = segment.copy_table(), asyncio.Event()
    slot = taken(copy_table, other.pid)
    copy_table.open(GRANT)
    segment.is_copying(slot, GRANT)
    assert not copy_table.close(GRANT, quiet.set)
    await looked_at(copy_table)
    assert not quiet.is_set()
    other.kill()  # not waited for yet
    await until(quiet.is_set)
    copy_table.leave(slot)
    await until(lambda: copy_table.take_slot(os.getpid()) == slot)


async def test_a_slot_is_given_again_when_its_lane_has_ended_at_both_sides(
    other: subprocess.Popen[bytes],
) -> None:
    segment = Segment()
    copy_table = segment.copy_table()
    slots = [taken(copy_table, other.pid) for _ in range(NUM_COPY_SLOTS)]
    assert sorted(slots) == list(range(NUM_COPY_SLOTS))
    assert copy_table.take_slot(other.pid) is None
    pages = segment.pages(5)
    copy_table.leave(5)
    await looked_at(copy_table)
    assert copy_table.take_slot(other.pid) is None
    pages.leave()
    await until(lambda: copy_table.take_slot(other.pid) == 5)


async def test_a_slot_that_nobody_took_is_given_again_and_its_token_is_worth_nothing(
    other: subprocess.Popen[bytes],
) -> None:
    """Whoever it was for gave up before he heard of it."""
    segment = Segment()
    copy_table = segment.copy_table()
    slot = taken(copy_table, other.pid)
    late = CopySlot(
        slot, copy_table.token(slot), len(segment.buffer) - COPY_TABLE_BYTES, 0, PAGE_BYTES, NUM_PAGES
    )
    copy_table.leave(slot)
    await until(lambda: copy_table.take_slot(other.pid) == slot)
    with pytest.raises(TransferError, match="given up meanwhile"):
        SharedPages(segment.buffer, late, LARGE, segment.source)
    segment.pages(slot)


async def test_those_who_were_copying_when_the_owner_died_are_found(other: subprocess.Popen[bytes]) -> None:
    segment = Segment()
    former = segment.copy_table()
    former.open(GRANT)
    slots = [taken(former, other.pid) for _ in range(2)]
    pages = [segment.pages(slot) for slot in slots]
    segment.is_copying(slots[1], GRANT)

    copy_table, quiet = segment.copy_table(), asyncio.Event()
    assert copy_table.former_copiers == [other.pid]
    copy_table.await_former(other.pid, quiet.set)
    await looked_at(copy_table)
    assert not quiet.is_set()
    write = Write(1, GRANT, [segment.entry])
    assert pages[0].place(write, LARGE.layer_bytes) is None
    assert copy_table.take_slot(os.getpid()) not in slots
    other.kill()
    await until(quiet.is_set)
    await until(lambda: copy_table.take_slot(os.getpid()) in slots)


def test_a_copy_of_an_earlier_life_is_over_when_its_slot_says_so() -> None:
    """However long its process lives, and whether that can be watched or not."""

    async def test(pid: int) -> None:
        segment = Segment()
        former = segment.copy_table()
        slots = [taken(former, os.getpid()) for _ in range(2)]
        for slot in slots:
            segment.words[2 * slot + 1] = 1 << 63 | pid  # who sits there
            segment.is_copying(slot, GRANT)
        copy_table, quiet = segment.copy_table(), asyncio.Event()
        copy_table.await_former(pid, quiet.set)
        segment.is_copying(slots[0], None)
        await looked_at(copy_table)
        assert not quiet.is_set()
        segment.is_copying(slots[1], GRANT + 1)  # it has gone on to another
        await until(quiet.is_set)

    asyncio.run(test(os.getpid()))
    with parked_thread() as thread_id:
        asyncio.run(test(thread_id))


async def test_a_copier_that_has_left_meanwhile_is_not_awaited(other: subprocess.Popen[bytes]) -> None:
    segment = Segment()
    former = segment.copy_table()
    slot = taken(former, other.pid)
    segment.is_copying(slot, GRANT)
    segment.pages(slot).leave()
    copy_table, quiet = segment.copy_table(), asyncio.Event()
    assert copy_table.former_copiers == []
    copy_table.await_former(other.pid, quiet.set)
    await until(quiet.is_set)


def test_a_former_process_that_cannot_be_watched_costs_its_slot_alone() -> None:
    """Its number may be a thread's by now."""

    async def test(thread_id: int) -> None:
        segment = Segment()
        former = segment.copy_table()
        slot = taken(former, os.getpid())
        segment.words[2 * slot + 1] = thread_id
        copy_table = segment.copy_table()
        slots = [taken(copy_table, os.getpid()) for _ in range(NUM_COPY_SLOTS - 1)]
        assert slot not in slots
        assert copy_table.take_slot(os.getpid()) is None

    with parked_thread() as thread_id:
        asyncio.run(test(thread_id))


def test_a_process_that_cannot_be_watched_has_no_slot_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with parked_thread() as thread_id:
        copy_table = Segment().copy_table()
        assert [copy_table.take_slot(thread_id) for _ in range(3)] == [None] * 3
        assert caplog.text.count("cannot be watched") == 1


async def test_nothing_is_written_to_a_page_after_its_grant_is_quiet() -> None:
    """A thread copies as fast as it can while the grant comes and goes."""
    segment = Segment()
    copy_table = segment.copy_table()
    pages, write = segment.pages(taken(copy_table, os.getpid())), Write(1, GRANT, [segment.entry])
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
            assert copy_table.open(GRANT)
            await until(lambda before=before: num_placed > before)  # type: ignore[misc]
            if not copy_table.close(GRANT, quiet.set):
                num_busy += 1
                await until(quiet.is_set)
            page[:] = 7  # somebody else's now
            for _ in range(3):
                assert np.all(page == 7)
    finally:
        has_ended.set()
        thread.join()
    assert num_busy


async def looked_at(copy_table: CopyTable) -> None:
    """It has looked at its slots twice."""
    for _ in range(2):
        looking = copy_table._looking
        await until(lambda looking=looking: copy_table._looking is not looking)  # type: ignore[misc]
