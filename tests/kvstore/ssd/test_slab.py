"""A slab outlives its processes: what a new one finds there, whatever the old one, or the disk, was doing."""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.pool import segment
from kvstore.pool.pages import PageState
from kvstore.pool.segment import FORMAT_VERSION
from kvstore.ssd.slab import MAGIC, Slab
from mooncake.errors import MismatchError
from mooncake.messages.blocks import KVLayout
from tests.kvstore.ssd.slabs import (
    FINGERPRINT,
    LAYOUT,
    SIZE_BYTES,
    aligned_block,
    block_of,
    files_open_in,
    key_of,
    load,
    numbers_found,
    open_slab,
    store,
)

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


@pytest.mark.parametrize("refuse", [refuse_direct_open, refuse_direct_read])
def test_file_system_without_direct_io_is_served_through_the_page_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[pytest.MonkeyPatch], None],
) -> None:
    refuse(monkeypatch)
    with contextlib.closing(open_slab(tmp_path)) as opened:
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
