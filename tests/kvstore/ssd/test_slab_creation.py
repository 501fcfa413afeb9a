"""The creation of a slab: its owner, what is refused, and deaths in the middle of writing."""

import contextlib
import errno
import os
import random
import resource
import select
import signal
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvstore.pool import segment
from kvstore.pool.pages import PageState
from kvstore.ssd import slab
from kvstore.ssd.slab import MAGIC, Record, Slab
from mooncake.errors import ConfigError, MismatchError
from tests.deadline import DEADLINE_S
from tests.kvstore.ssd.slabs import (
    LAYERS,
    LAYOUT,
    NOBODY,
    SIZE_BYTES,
    aligned_block,
    block_of,
    checksums_of,
    files_open_in,
    forked,
    key_of,
    load,
    numbers_found,
    open_slab,
    store,
)

# -- whose it is --------------------------------------------------------------------------------------


def test_slab_of_a_live_process_is_refused_by_name_and_that_of_a_dead_one_is_not(tmp_path: Path) -> None:
    is_open, tell = os.pipe()

    def own() -> None:
        store(open_slab(tmp_path), 4, number=1)
        os.write(tell, b"!")
        signal.pause()

    pid = forked(own)
    try:
        assert select.select([is_open], [], [], DEADLINE_S)[0]
        with pytest.raises(ConfigError, match=rf"kvcache.ssd_dirs: {tmp_path}/a.slab.* by process {pid};"):
            open_slab(tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(is_open)
        os.close(tell)
    with contextlib.closing(open_slab(tmp_path)) as opened:
        assert numbers_found(opened) == {4: 1}
        with pytest.raises(ConfigError, match=f"by process {os.getpid()};"):
            open_slab(tmp_path)


def test_slab_that_could_not_be_opened_is_not_locked(tmp_path: Path) -> None:
    open_slab(tmp_path).close()
    with pytest.raises(MismatchError):
        Slab.open(tmp_path, "a", SIZE_BYTES, "other", LAYOUT)
    assert files_open_in(tmp_path) == []
    open_slab(tmp_path).close()


@contextlib.contextmanager
def without_rights(directory: Path) -> Iterator[None]:
    """Nothing can be created in `directory`, not even by root."""
    directory.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(0o700)


def test_directory_that_cannot_be_used_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=f"kvcache.ssd_dirs: cannot use {directory}"):
            open_slab(directory)
    with (
        without_rights(tmp_path),
        pytest.raises(ConfigError, match=f"kvcache.ssd_dirs: cannot use {tmp_path} .Permission denied"),
    ):
        open_slab(tmp_path)


def test_size_that_holds_no_slot_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="65536 bytes hold no page"):
        open_slab(tmp_path, size_bytes=LAYOUT.block_bytes)
    assert os.listdir(tmp_path) == []


# -- creation -----------------------------------------------------------------------------------------


def test_slab_larger_than_the_free_space_is_refused_and_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the disk is filled up before it is found to be too small")

    disk = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", never)
    with pytest.raises(OSError, match=f"free some or lower kvcache.ssd_bytes.*{tmp_path}") as raised:
        open_slab(tmp_path, size_bytes=disk.f_bfree * disk.f_frsize + (1 << 30))
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["a.slab.lock"]


def test_allocation_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fallocate = os.posix_fallocate

    def allocate_half(fd: int, offset: int, num_bytes: int) -> None:
        fallocate(fd, offset, num_bytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate_half)
    with pytest.raises(OSError, match="No space left"):
        open_slab(tmp_path)
    assert os.listdir(tmp_path) == ["a.slab.lock"]
    monkeypatch.undo()
    open_slab(tmp_path).close()


def test_file_larger_than_allowed_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            open_slab(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ["a.slab.lock"]


@pytest.mark.cluster
def test_death_at_any_line_of_creation_leaves_no_slab_or_a_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(open_slab(tmp_path)) as opened:
        num_slots = opened.num_slots
    outcomes = set()
    num_lines, code = 0, -1
    while code != 0:
        for file in tmp_path.iterdir():
            file.unlink()
        num_lines += 1
        pid = forked(open_and_die, tmp_path, num_lines)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL)
        outcomes.add(frozenset(os.listdir(tmp_path)))
        with contextlib.closing(open_slab(tmp_path)) as opened:
            assert opened.num_slots == num_slots
            assert opened.table.count()[PageState.FREE] == num_slots
            assert load(opened, num_slots - 1) == aligned_block()
        assert set(os.listdir(tmp_path)) == {"a.slab", "a.slab.lock"}
    assert caplog.records == [], "a file that could not be used had got the slab's name"
    assert outcomes == {
        frozenset(),
        frozenset({"a.slab.lock"}),
        frozenset({"a.slab.lock", "a.slab.new"}),
        frozenset({"a.slab.lock", "a.slab"}),
    }


def open_and_die(directory: Path, num_lines: int) -> None:
    """Opens a slab, and is killed before the `num_lines`-th line that touches it if there are as many."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != slab.__file__ and frame.f_code is not segment.write_header.__code__:
            return None
        num_lines -= 1
        if num_lines == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    open_slab(directory)
    sys.settrace(None)


# -- crashes ------------------------------------------------------------------------------------------

_NUM_THREADS = 4
_STORED = struct.Struct("<QQ")  # slot, number


def churn(directory: Path, seed: int, reports: int) -> None:
    """Stores random blocks in random slots for ever, and reports each one once it is sealed."""
    opened = open_slab(directory)
    numbers_found(opened)
    draw, number = random.Random(seed), seed << 32
    unused = [aligned_block() for _ in range(_NUM_THREADS)]
    writes: dict[Future[None], tuple[int, int, memoryview]] = {}
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        while True:
            while unused:
                slot = draw.randrange(opened.num_slots)
                if any(slot == written for written, _, _ in writes.values()):
                    continue
                number, block = number + 1, unused.pop()
                block[:] = key_of(number) + draw.randbytes(len(block) - 16)
                record = Record(key_of(number), checksums_of(block), number, position=0, num_uses=1)
                writes[threads.submit(opened.store, slot, block, record)] = slot, number, block
            for write in wait(writes, return_when=FIRST_COMPLETED).done:
                slot, stored_number, block = writes.pop(write)
                write.result()
                os.write(reports, _STORED.pack(slot, stored_number))
                unused.append(block)


def reports_until_killed(pid: int, reports: int, num_reports: int) -> list[tuple[int, int]]:
    """What `pid` reported. It is killed after so many reports, or a few more."""
    received = bytearray()
    while len(received) < num_reports * _STORED.size:
        assert select.select([reports], [], [], DEADLINE_S)[0], "the child stores nothing"
        received += os.read(reports, 1 << 16)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while part := os.read(reports, 1 << 16):
        received += part
    return list(_STORED.iter_unpack(received))


@pytest.mark.parametrize("num_kills", [15, pytest.param(200, marks=pytest.mark.soak)])
def test_process_killed_at_any_moment_leaves_every_sealed_block_whole(tmp_path: Path, num_kills: int) -> None:
    draw = random.Random(num_kills)
    stored: dict[int, int] = {}
    num_interrupted = 0
    for seed in range(1, num_kills + 1):
        reports, report = os.pipe()
        pid = forked(churn, tmp_path, seed, report)
        os.close(report)
        newly_stored = reports_until_killed(pid, reports, draw.randint(1, 100))
        os.close(reports)
        stored.update(newly_stored)
        with contextlib.closing(open_slab(tmp_path)) as opened:
            num_interrupted += opened.table.count()[PageState.RESERVED]
            found = numbers_found(opened)
        lost = [slot for slot, number in stored.items() if found.get(slot, 0) < number]
        unreported = [slot for slot, number in found.items() if stored.get(slot, 0) < number]
        assert len(lost) + len(unreported) <= _NUM_THREADS, f"kill {seed}: {lost} lost, {unreported} new"
        stored = found
    assert num_interrupted > num_kills // 5


def test_record_torn_by_a_power_loss_is_recognised(tmp_path: Path) -> None:
    """Of what was written last, the disk has some sectors and lacks others."""
    sector_bytes = 512
    with contextlib.closing(open_slab(tmp_path)) as opened:
        path, num_slots = opened.path, opened.num_slots
        for slot in range(num_slots):
            store(opened, slot, number=1 + slot)
    old = path.read_bytes()
    with contextlib.closing(open_slab(tmp_path)) as opened:
        for slot in range(num_slots):
            store(opened, slot, number=1001 + slot)
    new = path.read_bytes()
    header = segment.read_header(memoryview(new), MAGIC, "the slab")
    assert header is not None
    changed = [
        start for start in range(0, len(new), sector_bytes) if new[start:][:sector_bytes] != old[start:][:512]
    ]
    outcomes = set()
    for seed in range(20):
        draw = random.Random(seed)
        torn = bytearray(new)
        is_slot_old = [draw.random() < 0.4 for _ in range(num_slots)]
        for start in changed:
            slot = (start - header.pages_offset) // header.page_stride
            is_old = draw.random() < 0.5 if slot < 0 else is_slot_old[slot] and draw.random() < 0.999
            if is_old:
                torn[start : start + sector_bytes] = old[start : start + sector_bytes]
        path.write_bytes(torn)
        with contextlib.closing(open_slab(tmp_path)) as opened:
            for slot in opened.table.adopt().sealed:
                block = load(opened, slot)
                is_intact = opened.table.is_intact(slot)
                is_verified = opened.table.checksums(slot, LAYERS) == checksums_of(block)
                if is_intact and is_verified:
                    assert block == block_of(opened.table.key(slot))
                outcomes.add((is_intact, is_verified))
    assert outcomes == {(False, False), (False, True), (True, False), (True, True)}
