"""The segment outlives its processes: what a new one finds there, whatever the old one was doing."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore import pages
from kvstore.pages import PageState, PageTable, page_dtype
from kvstore.segment import ALIGNMENT, Segment
from mooncake.blocks import KVLayout
from mooncake.errors import ConfigError, MismatchError
from tests.kvstore.nodes import FINGERPRINT, LAYOUT, ROOT

KEY = bytes(range(16))


@pytest.fixture
def segment_fd() -> Iterator[int]:
    fd = os.memfd_create("segment")
    os.posix_fallocate(fd, 0, 1 << 18)
    yield fd
    os.close(fd)


def test_formatted_segment_is_found_again(segment_fd: int) -> None:
    assert Segment.open(segment_fd) is None
    formatted = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    opened = Segment.open(segment_fd)
    assert opened is not None
    assert (opened.fingerprint, opened.layout, opened.num_pages) == (FINGERPRINT, LAYOUT, formatted.num_pages)
    formatted.layer_view(3, 1)[:] = b"x" * LAYOUT.layer_bytes
    assert opened.layer_view(3, 1) == b"x" * LAYOUT.layer_bytes


def test_pages_are_aligned_disjoint_and_inside(segment_fd: int) -> None:
    segment = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    offsets = [segment.page_offset(page) for page in range(segment.num_pages)]
    table_end = ALIGNMENT + segment.num_pages * page_dtype(LAYOUT.num_layers).itemsize
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert offsets[0] >= table_end
    assert min(np.diff(offsets)) >= LAYOUT.block_bytes
    assert offsets[-1] + LAYOUT.block_bytes <= len(segment.buffer)
    assert segment.layers_offset(1, 2) == offsets[1] + 2 * LAYOUT.layer_bytes


def test_other_model_or_layout_is_refused_by_name(segment_fd: int) -> None:
    segment = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    with pytest.raises(
        MismatchError, match=f"model fingerprint differs: ours is {FINGERPRINT}, theirs is other"
    ):
        segment.check("other", LAYOUT)
    wider = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")
    with pytest.raises(MismatchError, match=r"head_dim=16.*head_dim=32"):
        segment.check(FINGERPRINT, wider)


def test_segment_too_small_for_one_page_is_refused() -> None:
    fd = os.memfd_create("small")
    os.posix_fallocate(fd, 0, 2 * ALIGNMENT)
    with pytest.raises(ConfigError, match="holds no page"):
        Segment.format(fd, FINGERPRINT, LAYOUT)
    os.close(fd)


def test_segment_of_another_format_is_not_overwritten(segment_fd: int) -> None:
    os.pwrite(segment_fd, b"SOMETHING ELSE", 0)
    with pytest.raises(MismatchError, match="segment format"):
        Segment.open(segment_fd)


def test_half_formatted_segment_counts_as_unformatted(segment_fd: int) -> None:
    Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    os.pwrite(segment_fd, bytes(8), 0)  # all written but the magic, which comes last
    assert Segment.open(segment_fd) is None


@pytest.mark.parametrize("state", [PageState.FREE, PageState.RESERVED, PageState.QUARANTINED, 77])
def test_adoption_frees_every_page_that_is_not_sealed(state: int) -> None:
    records = np.zeros(2, page_dtype(LAYOUT.num_layers))
    table = PageTable(records)
    table.reserve(0)
    table.seal(0, KEY, last_use=5)
    records["state"][1] = state
    records["key"][1] = np.void(KEY)
    assert table.adopt() == [0]
    assert (table.state(0), table.generation(0), table.key(0)) == (PageState.SEALED, 0, KEY)
    assert (table.state(1), table.generation(1)) == (PageState.FREE, 1)


def snapshots_of(
    records: "np.ndarray[Any, np.dtype[np.void]]", action: Callable[[], None]
) -> list[PageTable]:
    """The table as a process would leave it if it died before any line of the page table's code."""
    snapshots = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename == pages.__file__:
            snapshots.append(PageTable(records.copy()))
            return trace
        return None

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return [*snapshots, PageTable(records.copy())]


def test_death_between_any_two_writes_leaves_the_page_whole_or_free() -> None:
    records = np.zeros(1, page_dtype(LAYOUT.num_layers))
    table, layers = PageTable(records), range(LAYOUT.num_layers)
    checksums = bytes(range(8 * len(layers)))

    def store() -> None:
        table.reserve(0)
        table.set_checksums(0, layers, checksums)
        table.seal(0, KEY, last_use=9)

    outcomes = []
    for action in (store, lambda: table.free(0)):
        for left in snapshots_of(records, action):
            if left.adopt():
                assert (left.key(0), left.checksums(0, layers), left.last_use(0)) == (KEY, checksums, 9)
            else:
                assert left.generation(0) > 0, "a write for the page's earlier use would be accepted"
            outcomes.append(left.state(0))
    assert set(outcomes) == {PageState.FREE, PageState.SEALED}


def test_adoption_keeps_the_order_of_use() -> None:
    table = PageTable.in_memory(3, LAYOUT.num_layers)
    for page, last_use in enumerate([7, 3, 5]):
        table.reserve(page)
        table.seal(page, bytes([page]) * 16, last_use)
    assert table.adopt() == [1, 2, 0]


def test_transition_that_is_not_in_the_table_is_a_bug() -> None:
    table = PageTable.in_memory(1, LAYOUT.num_layers)
    with pytest.raises(AssertionError, match="FREE -> SEALED"):
        table.seal(0, KEY, 1)


_CHURN = """
import sys, xxhash
from kvstore.pool import Pool
from kvstore.segment import Segment
segment = Segment.open(int(sys.argv[1]))
pool = Pool(segment.page_table(), on_space=lambda: None)
print("churning", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    reservation = pool.reserve(1, [number.to_bytes(16, "little")], 0)
    block = reservation.blocks[0]
    for layer in range(segment.layout.num_layers):
        view = segment.layer_view(block.page, layer)
        view[:] = (number.to_bytes(8, "little") + bytes([layer]) * 8) * (len(view) // 16)
        checksum = xxhash.xxh3_64_intdigest(view).to_bytes(8, "little")
        pool.arrived(reservation, block, range(layer, layer + 1), checksum)
    pool.release(reservation.reservation_id)
"""


def test_process_killed_at_any_instant_leaves_no_torn_sealed_page(segment_fd: int, tmp_path: Path) -> None:
    segment = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    script = tmp_path / "churn.py"
    script.write_text(_CHURN)
    num_adopted = 0
    for first_number, extra_uses in ((0, 1), (10_000, 200), (20_000, 333), (30_000, 470)):
        table = segment.page_table()
        last_use = max(table.last_use(page) for page in range(segment.num_pages))
        child = subprocess.Popen(
            [sys.executable, str(script), str(segment_fd), str(first_number)],
            pass_fds=[segment_fd],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"churning\n"
        while max(table.last_use(page) for page in range(segment.num_pages)) < last_use + extra_uses:
            assert child.poll() is None
        child.kill()
        child.wait()
        child.stdout.close()
        for page in table.adopt():
            num_adopted += 1
            number = int.from_bytes(table.key(page), "little")
            for layer in range(LAYOUT.num_layers):
                view = segment.layer_view(page, layer)
                assert view[:8] == number.to_bytes(8, "little")
                checksum = xxhash.xxh3_64_intdigest(view).to_bytes(8, "little")
                assert table.checksums(page, range(layer, layer + 1)) == checksum
    assert num_adopted > 0
