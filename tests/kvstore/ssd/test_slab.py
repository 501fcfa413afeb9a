"""A slab outlives its processes: what a new one finds there, whatever the old one, or the disk, was doing."""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import random
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore.pool import segment
from kvstore.pool.pages import PageState
from kvstore.pool.segment import FORMAT_VERSION
from kvstore.ssd import slab
from kvstore.ssd.slab import MAGIC, Record, Slab
from mooncake.errors import ConfigError, MismatchError
from mooncake.messages.blocks import KVLayout
from tests.deadline import DEADLINE_S

FINGERPRINT = "f" * 32
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=128, dtype="bfloat16")
LAYERS = range(LAYOUT.num_layers)
SIZE_BYTES = 3 << 20
NOBODY = 65534


def open_slab(directory: Path, *, size_bytes: int = SIZE_BYTES) -> Slab:
    return Slab.open(directory, "a", size_bytes, FINGERPRINT, LAYOUT)


def aligned_block(content: bytes = b"") -> memoryview:
    """A slot's worth of memory that begins with `content`, aligned as in a segment."""
    block = memoryview(mmap.mmap(-1, LAYOUT.block_bytes))
    block[: len(content)] = content
    return block


def block_of(key: bytes) -> memoryview:
    """The block that these tests store under `key`: nothing else has this content."""
    data = np.random.default_rng(int.from_bytes(key, "little")).bytes(LAYOUT.block_bytes - len(key))
    return aligned_block(key + data)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def checksums_of(block: memoryview) -> bytes:
    layers = [block[layer * LAYOUT.layer_bytes : (layer + 1) * LAYOUT.layer_bytes] for layer in LAYERS]
    return b"".join(xxhash.xxh3_64_intdigest(layer).to_bytes(8, "little") for layer in layers)


def store(stored_in: Slab, slot: int, number: int) -> None:
    """What the tier does to store one block."""
    block = block_of(key_of(number))
    record = Record(key_of(number), checksums_of(block), last_use=number, position=0, num_uses=1)
    stored_in.store(slot, block, record)


def load(stored_in: Slab, slot: int) -> memoryview:
    block = aligned_block()
    stored_in.read(slot, block)
    return block


def numbers_found(stored_in: Slab) -> dict[int, int]:
    """Adopts, and verifies every block: the number of each, by slot."""
    found = {}
    for slot in stored_in.table.adopt().sealed:
        block = load(stored_in, slot)
        assert stored_in.table.is_intact(slot)
        assert stored_in.table.checksums(slot, LAYERS) == checksums_of(block)
        assert block[:16] == stored_in.table.key(slot)
        found[slot] = int.from_bytes(block[:16], "little")
    return found


def forked(child: Callable[..., None], *arguments: object) -> int:
    """The pid of a process that calls `child` and ends, with code 0 unless it raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(*arguments)
            code = 0
        finally:
            os._exit(code)
    return pid


# -- records ------------------------------------------------------------------------------------------


def test_erased_block_is_not_found_again_unless_another_has_come(tmp_path: Path) -> None:
    with contextlib.closing(open_slab(tmp_path)) as slab:
        for slot in range(3):
            store(slab, slot, slot + 1)
        slab.erase(0, lambda: True)
        slab.erase(1, lambda: False)  # taken for another block meanwhile
    with contextlib.closing(open_slab(tmp_path)) as slab:
        assert numbers_found(slab) == {1: 2, 2: 3}


# -- slots --------------------------------------------------------------------------------------------


def test_threads_read_back_what_threads_wrote(tmp_path: Path) -> None:
    with contextlib.closing(open_slab(tmp_path)) as opened, ThreadPoolExecutor(4) as threads:
        slots = range(opened.num_slots)
        blocks = [block_of(key_of(slot + 1)) for slot in slots]
        list(threads.map(opened.write, slots, blocks))
        read = [aligned_block() for _ in slots]
        list(threads.map(opened.read, slots, read))
    assert read == blocks
    assert len(slots) > 40


def test_all_space_is_taken_at_creation_and_no_more_than_configured(tmp_path: Path) -> None:
    with contextlib.closing(open_slab(tmp_path)) as opened:
        facts = opened.path.stat()
        assert opened.path == tmp_path / "a.slab"
        assert opened.slot_bytes == LAYOUT.block_bytes
        assert opened.num_slots * opened.slot_bytes <= facts.st_size <= SIZE_BYTES
        assert facts.st_blocks * 512 >= facts.st_size
        assert facts.st_mode & 0o077 == 0, "others can read what users wrote"


def test_block_of_another_size_is_a_bug(tmp_path: Path) -> None:
    with contextlib.closing(open_slab(tmp_path)) as opened:
        for move in (opened.write, opened.read):
            with pytest.raises(AssertionError):
                move(0, aligned_block()[:4096])


def test_short_transfers_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: pwritev(fd, [views[0][:12288]], offset))
    with contextlib.closing(open_slab(tmp_path)) as opened:
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:20480]], offset))
        opened.write(3, block_of(key_of(1)))
        assert load(opened, 3) == block_of(key_of(1))


def test_transfer_that_fails_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with contextlib.closing(open_slab(tmp_path)) as opened:
        os.truncate(opened.path, opened.path.stat().st_size - opened.slot_bytes)
        with pytest.raises(OSError, match=r"truncated.*a\.slab") as raised:
            load(opened, opened.num_slots - 1)
        assert raised.value.errno == errno.EIO
        monkeypatch.setattr(os, "pwritev", refuse)
        with pytest.raises(OSError, match="No space"):
            opened.write(0, aligned_block())
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(OSError, match="truncated"):
            opened.write(0, aligned_block())


def refuse_direct_open(monkeypatch: pytest.MonkeyPatch) -> None:
    os_open = os.open

    def refuse(path: str, flags: int, *arguments: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return os_open(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refuse)


def refuse_direct_read(monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def refuse(fd: int, views: list[memoryview], offset: int) -> int:
        if os.O_DIRECT & fcntl_flags(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refuse)


def fcntl_flags(fd: int) -> int:
    fields = dict(line.split(":") for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines())
    return int(fields["flags"], 8)


def files_open_in(directory: Path) -> list[Path]:
    """What descriptors of this process lead to."""
    links = Path("/proc/self/fd").iterdir()
    return [path for link in links if (path := Path(os.path.realpath(link))).is_relative_to(directory)]


@pytest.mark.parametrize("refuse", [refuse_direct_open, refuse_direct_read])
def test_file_system_without_direct_io_is_served_through_the_page_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[pytest.MonkeyPatch], None],
) -> None:
    refuse(monkeypatch)
    with contextlib.closing(open_slab(tmp_path)) as opened:
        assert not opened.is_direct
        store(opened, 5, number=1)
        assert load(opened, 5) == block_of(key_of(1))
    assert [record.message for record in caplog.records if "O_DIRECT" in record.message] == [
        f"{tmp_path}/a.slab: its file system has no O_DIRECT; blocks go through the page cache"
    ]
    del opened  # and its mapping
    assert files_open_in(tmp_path) == []


def has_direct_io(directory: Path) -> bool:
    try:
        fd = os.open(directory / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.pwritev(fd, [aligned_block()], 0) == LAYOUT.block_bytes
    except OSError:
        return False
    finally:
        os.close(fd)


def test_blocks_do_not_enter_the_page_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    with contextlib.closing(open_slab(tmp_path)) as opened:
        assert opened.is_direct
        assert caplog.records == []
        for slot in range(opened.num_slots):
            opened.write(slot, block_of(key_of(slot)))
            load(opened, slot)
        assert num_cached_bytes(opened.path) < opened.slot_bytes


def num_cached_bytes(path: Path) -> int:
    """Of a file, in the page cache. Asking by reads that do not wait would begin to read ahead into it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        pages = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
        first = ctypes.c_char.from_buffer(mapping)
        address, num_bytes = ctypes.addressof(first), len(mapping)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_void_p(pages.ctypes.data)
        )
        del first
        assert not failed, os.strerror(ctypes.get_errno())
        return int((pages & 1).sum()) * mmap.PAGESIZE


# -- what is there already ----------------------------------------------------------------------------


def test_reopened_slab_holds_what_was_stored(tmp_path: Path) -> None:
    with contextlib.closing(open_slab(tmp_path)) as opened:
        for slot, number in ((7, 1), (2, 2), (7, 3)):
            store(opened, slot, number)
        opened.table.reserve(9)
    with contextlib.closing(open_slab(tmp_path)) as opened:
        assert numbers_found(opened) == {2: 2, 7: 3}
        assert opened.table.state(9) is PageState.FREE


@pytest.mark.parametrize(
    "start", [b"SOMETHING ELSE", b"short", segment.MAGIC, MAGIC + (FORMAT_VERSION + 1).to_bytes(4, "little")]
)
def test_file_of_another_format_is_refused_and_left_alone(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "a.slab").write_bytes(start)
    with pytest.raises(MismatchError, match=rf"format of {tmp_path}/a.slab differs.*MCKVSLB.*remove it"):
        open_slab(tmp_path)
    assert (tmp_path / "a.slab").read_bytes() == start


def test_file_of_another_model_or_layout_is_refused_and_left_alone(tmp_path: Path) -> None:
    with contextlib.closing(open_slab(tmp_path)) as opened:
        store(opened, 0, number=1)
    with pytest.raises(
        MismatchError,
        match=f"model fingerprint of {tmp_path}/a.slab differs: ours is other, theirs is {FINGERPRINT};"
        " remove the file",
    ):
        Slab.open(tmp_path, "a", SIZE_BYTES, "other", LAYOUT)
    wider = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")
    with pytest.raises(
        MismatchError, match=rf"{tmp_path}/a.slab .*head_dim=32.*head_dim=16.*kvcache.ssd_dirs"
    ):
        Slab.open(tmp_path, "a", SIZE_BYTES, FINGERPRINT, wider)
    with contextlib.closing(open_slab(tmp_path)) as opened:
        assert numbers_found(opened) == {0: 1}


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES // 2, SIZE_BYTES * 2])
def test_slab_of_another_size_keeps_its_size_and_its_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size_bytes: int
) -> None:
    with contextlib.closing(open_slab(tmp_path)) as opened:
        num_slots, file_bytes = opened.num_slots, opened.path.stat().st_size
        store(opened, num_slots - 1, number=1)
    assert caplog.records == []
    with contextlib.closing(open_slab(tmp_path, size_bytes=size_bytes)) as opened:
        assert (opened.num_slots, opened.path.stat().st_size) == (num_slots, file_bytes)
        assert numbers_found(opened) == {num_slots - 1: 1}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"a.slab keeps its {num_slots} slots ({file_bytes} bytes)" in record.message
    assert "remove the file" in record.message


def test_size_within_rounding_is_no_other_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_slab(tmp_path).close()
    open_slab(tmp_path, size_bytes=SIZE_BYTES + 1).close()
    assert caplog.records == []


def truncate(path: Path) -> None:
    os.truncate(path, SIZE_BYTES // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero_header(path: Path) -> None:
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])


def garble_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:16] + b"\xff" * 40 + path.read_bytes()[56:])


@pytest.mark.parametrize("damage", [truncate, empty, zero_header, garble_header])
def test_damaged_file_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    with contextlib.closing(open_slab(tmp_path)) as opened:
        store(opened, 0, number=1)
        num_slots = opened.num_slots
    damage(opened.path)
    with contextlib.closing(open_slab(tmp_path)) as opened:
        assert opened.num_slots == num_slots
        assert numbers_found(opened) == {}
        store(opened, num_slots - 1, number=2)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/a.slab is damaged: nothing can be read from it, and it is made anew"
    ]


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


def reports_until_killed(pid: int, reports: int, life_s: float) -> list[tuple[int, int]]:
    """What `pid` reported. It is killed `life_s` after its first report."""
    assert select.select([reports], [], [], DEADLINE_S)[0], "the child stores nothing"
    kill_at = time.monotonic() + life_s
    received = bytearray()
    while (left_s := kill_at - time.monotonic()) > 0:
        if select.select([reports], [], [], left_s)[0]:
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
    num_stored = num_interrupted = 0
    for seed in range(1, num_kills + 1):
        reports, report = os.pipe()
        pid = forked(churn, tmp_path, seed, report)
        os.close(report)
        newly_stored = reports_until_killed(pid, reports, life_s=draw.uniform(0, 0.1))
        os.close(reports)
        stored.update(newly_stored)
        num_stored += len(newly_stored)
        with contextlib.closing(open_slab(tmp_path)) as opened:
            num_interrupted += opened.table.count()[PageState.RESERVED]
            found = numbers_found(opened)
        lost = [slot for slot, number in stored.items() if found.get(slot, 0) < number]
        unreported = [slot for slot, number in found.items() if stored.get(slot, 0) < number]
        assert len(lost) + len(unreported) <= _NUM_THREADS, f"kill {seed}: {lost} lost, {unreported} new"
        stored = found
    assert num_stored > 20 * num_kills
    assert num_interrupted > num_kills // 2


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
