"""The segment outlives its processes: what a new one finds there, whatever the old one was doing."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore.pool import pages
from kvstore.pool.pages import Adopted, PageState, PageTable, PageWriter, record_bytes, table_bytes
from kvstore.pool.segment import ALIGNMENT, FORMAT_VERSION, MAGIC, Segment, SegmentHeader
from mooncake.errors import ConfigError, MismatchError
from mooncake.messages.blocks import KVLayout
from tests.kvstore.nodes import FINGERPRINT, LAYOUT, ROOT

KEY = bytes(range(16))
LAYERS = range(LAYOUT.num_layers)
CHECKSUMS = bytes(range(8 * len(LAYERS)))
WRITER = PageWriter(pid=4_194_304, serial=3)


@pytest.fixture
def segment_fd() -> Iterator[int]:
    fd = os.memfd_create("segment")
    os.posix_fallocate(fd, 0, 1 << 18)
    yield fd
    os.close(fd)


# -- format -------------------------------------------------------------------------------------------


def test_formatted_segment_is_found_again(segment_fd: int) -> None:
    assert Segment.open(segment_fd) is None
    formatted = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    opened = Segment.open(segment_fd)
    assert opened is not None
    assert opened.header == formatted.header
    assert (opened.fingerprint, opened.layout) == (FINGERPRINT, LAYOUT)
    formatted.layer_view(3, 1)[:] = b"x" * LAYOUT.layer_bytes
    assert opened.layer_view(3, 1) == b"x" * LAYOUT.layer_bytes


def test_pages_are_aligned_disjoint_and_inside(segment_fd: int) -> None:
    segment = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    offsets = [segment.page_offset(page) for page in range(segment.num_pages)]
    table_end = segment.header.table_offset + table_bytes(segment.num_pages, LAYOUT.num_layers)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert offsets[0] >= table_end
    assert min(np.diff(offsets)) >= LAYOUT.block_bytes
    assert offsets[-1] + LAYOUT.block_bytes <= segment.header.size_bytes <= len(segment.buffer)
    assert segment.layers_offset(1, 2) == offsets[1] + 2 * LAYOUT.layer_bytes


@pytest.mark.parametrize("num_layers", [1, 4, 61])
def test_as_many_pages_as_fit_are_planned(num_layers: int) -> None:
    layout = KVLayout(num_layers, num_kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16")
    stride = SegmentHeader.plan(1 << 20, FINGERPRINT, layout).page_stride
    page_bytes = stride + record_bytes(num_layers)
    draw = random.Random(num_layers)
    for num_pages in (1, 2, 63, 64, 65, *(draw.randrange(1, 1 << 20) for _ in range(200))):
        size_bytes = num_pages * page_bytes + 3 * ALIGNMENT
        header = SegmentHeader.plan(size_bytes, FINGERPRINT, layout)
        assert header.num_pages == num_pages
        assert size_bytes - 3 * ALIGNMENT < header.size_bytes <= size_bytes
        if num_pages > 1:
            assert SegmentHeader.plan(size_bytes - 1, FINGERPRINT, layout).num_pages == num_pages - 1


@pytest.mark.parametrize("size_bytes", [0, ALIGNMENT, 3 * ALIGNMENT + LAYOUT.block_bytes])
def test_size_that_holds_no_page_is_refused(size_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"{size_bytes} bytes hold no page of {LAYOUT.block_bytes}"):
        SegmentHeader.plan(size_bytes, FINGERPRINT, LAYOUT)


def test_other_model_or_layout_is_refused_by_name(segment_fd: int) -> None:
    segment = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    segment.header.check(FINGERPRINT, LAYOUT)
    with pytest.raises(
        MismatchError, match=f"model fingerprint differs: ours is {FINGERPRINT}, theirs is other"
    ):
        segment.header.check("other", LAYOUT)
    wider = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")
    with pytest.raises(MismatchError, match=r"head_dim=16.*head_dim=32"):
        segment.header.check(FINGERPRINT, wider)


@pytest.mark.parametrize(
    "start", [b"SOMETHING ELSE", b"MCKVSLB\0", MAGIC + (FORMAT_VERSION + 1).to_bytes(4, "little")]
)
def test_segment_of_another_format_is_not_overwritten(segment_fd: int, start: bytes) -> None:
    os.pwrite(segment_fd, start, 0)
    with pytest.raises(MismatchError, match="format of the segment"):
        Segment.open(segment_fd)


@pytest.mark.parametrize("damage", [b"\xc1" * 64, bytes(64)])
def test_segment_with_a_damaged_header_is_named(segment_fd: int, damage: bytes) -> None:
    Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    os.pwrite(segment_fd, damage, 16)  # behind the magic, the version and the length
    with pytest.raises(ConfigError, match=r"header is damaged .* remove its file in kvcache.segment_dir"):
        Segment.open(segment_fd)


def test_half_formatted_segment_counts_as_unformatted(segment_fd: int) -> None:
    Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    os.pwrite(segment_fd, bytes(8), 0)  # all written but the magic, which comes last
    assert Segment.open(segment_fd) is None


def test_half_formatted_segment_can_be_formatted(segment_fd: int) -> None:
    segment = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    segment.page_table().reserve(0)
    os.pwrite(segment_fd, bytes(8), 0)
    assert Segment.format(segment_fd, FINGERPRINT, LAYOUT).page_table().count()[PageState.RESERVED] == 0


def test_segment_that_shrank_is_refused(segment_fd: int) -> None:
    Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    os.ftruncate(segment_fd, 1 << 17)
    with pytest.raises(ConfigError, match="restore its size"):
        Segment.open(segment_fd)


# -- table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [1, 3, 64, 1000])
def test_fields_of_the_table_are_aligned_and_disjoint(num_pages: int) -> None:
    buffer = bytearray(table_bytes(num_pages, LAYOUT.num_layers))
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    table = PageTable(buffer, num_pages, LAYOUT.num_layers)
    fields = sorted(table._arrays.values(), key=lambda field: field.ctypes.data)
    assert sum(field.nbytes for field in fields) == num_pages * record_bytes(LAYOUT.num_layers)
    assert all((field.ctypes.data - start) % 64 == 0 for field in fields)
    ends = [field.ctypes.data + field.nbytes for field in fields]
    assert all(end <= field.ctypes.data for end, field in zip(ends, fields[1:], strict=False))
    assert ends[-1] <= start + len(buffer)


@pytest.mark.parametrize(
    ("state", "generation"),
    [(PageState.FREE, 0), (PageState.RESERVED, 1), (PageState.QUARANTINED, 1), (77, 1)],
)
def test_adoption_frees_every_page_that_is_not_sealed(state: int, generation: int) -> None:
    table = sealed_table(KEY, KEY[::-1])
    table.states[1] = state
    assert table.adopt() == Adopted(sealed=[0], quarantined={})
    assert (table.state(0), table.generation(0), table.key(0)) == (PageState.SEALED, 0, KEY)
    assert (table.state(1), table.generation(1)) == (PageState.FREE, generation)


def test_adoption_quarantines_what_a_writer_may_still_write() -> None:
    table = PageTable.in_memory(4, LAYOUT.num_layers)
    for page in range(3):
        table.reserve(page, WRITER)
    table.reserve(3)
    table.quarantine(1)
    table.set_checksums(2, LAYERS, CHECKSUMS)
    table.seal(2, KEY, last_use=1)
    assert table.adopt() == Adopted(sealed=[2], quarantined={0: WRITER, 1: WRITER})
    assert [table.state(page) for page in range(4)] == [
        PageState.QUARANTINED,
        PageState.QUARANTINED,
        PageState.SEALED,
        PageState.FREE,
    ]
    # The next owner may die as well before the writer does.
    assert table.adopt() == Adopted(sealed=[2], quarantined={0: WRITER, 1: WRITER})
    table.free(0)
    assert (table.state(0), table.generation(0)) == (PageState.FREE, 1)


def test_page_that_had_a_writer_once_is_not_quarantined_for_it() -> None:
    table = PageTable.in_memory(1, LAYOUT.num_layers)
    table.reserve(0, WRITER)
    table.free(0)
    assert table.adopt().quarantined == {}
    table.reserve(0)
    assert table.adopt().quarantined == {}


def test_adoption_keeps_the_page_of_a_block_that_was_used_last() -> None:
    table = sealed_table(KEY, KEY)
    assert table.adopt().sealed == [1]
    assert (table.state(0), table.generation(0)) == (PageState.FREE, 1)


def test_adoption_keeps_the_order_of_use() -> None:
    table = PageTable.in_memory(3, LAYOUT.num_layers)
    for page in range(3):
        table.reserve(page)
    for page, last_use in enumerate([7, 3, 5]):
        table.seal(page, bytes([page]) * 16, last_use)
    assert table.adopt().sealed == [1, 2, 0]


def test_record_whose_key_and_checksums_do_not_belong_together_is_not_intact() -> None:
    keys = KEY, KEY[::-1]
    for field in ("_key", "_seal", "_checksums"):
        table = sealed_table(*keys)
        assert [table.is_intact(0), table.is_intact(1)] == [True, True]
        array = getattr(table, field)
        array[0] = array[1]  # as if only this much of the record had reached the disk
        assert [table.is_intact(0), table.is_intact(1)] == [False, True]


def test_zeroed_record_is_not_intact() -> None:
    table = PageTable.in_memory(1, LAYOUT.num_layers)
    table.states[0] = PageState.SEALED
    assert not table.is_intact(0)


def test_uses_are_counted_up_to_the_largest_number() -> None:
    table = sealed_table(KEY, KEY[::-1])
    table.use(1)
    assert table.num_uses.tolist() == [1, 2]
    table.num_uses[0] = 0xFFFFFFFE
    for _ in range(3):
        table.use(0)
        table.use(1)
    assert table.num_uses.tolist() == [0xFFFFFFFF, 5]


def test_transition_that_is_not_in_the_table_is_a_bug() -> None:
    table = PageTable.in_memory(1, LAYOUT.num_layers)
    with pytest.raises(AssertionError, match="FREE -> SEALED"):
        table.seal(0, KEY, 1)
    table.reserve(0)
    with pytest.raises(AssertionError, match="RESERVED -> RESERVED"):
        table.reserve(0)


def sealed_table(*keys: bytes) -> PageTable:
    """A table with one SEALED page for each of `keys`, with other checksums in each."""
    table = PageTable.in_memory(len(keys), LAYOUT.num_layers)
    for page in range(len(keys)):
        table.reserve(page)
    for page, key in enumerate(keys):
        table.set_checksums(page, LAYERS, bytes([page]) + CHECKSUMS[1:])
        table.seal(page, key, last_use=5 + page)
    return table


# -- death --------------------------------------------------------------------------------------------


def snapshots_of(buffer: bytearray, action: Callable[[], None]) -> list[PageTable]:
    """The table as a process would leave it if it died before any line of the page table's code."""
    snapshots = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename == pages.__file__:
            snapshots.append(bytearray(buffer))
            return trace
        return None

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return [PageTable(snapshot, 1, LAYOUT.num_layers) for snapshot in (*snapshots, bytearray(buffer))]


def test_death_between_any_two_writes_leaves_the_page_whole_or_free() -> None:
    buffer = bytearray(table_bytes(1, LAYOUT.num_layers))
    table = PageTable(buffer, 1, LAYOUT.num_layers)

    def store() -> None:
        table.reserve(0)
        table.set_checksums(0, LAYERS, CHECKSUMS)
        table.seal(0, KEY, last_use=9)

    def free() -> None:
        table.free(0)

    outcomes = []
    for action in (store, free):
        for left in snapshots_of(buffer, action):
            was_used = action is free or left.state(0) is not PageState.FREE
            if left.adopt().sealed:
                assert (left.key(0), left.checksums(0, LAYERS), left.last_use(0)) == (KEY, CHECKSUMS, 9)
                assert left.is_intact(0)
            elif was_used:
                assert left.generation(0) > 0, "a write for the page's earlier use would be accepted"
            outcomes.append(left.state(0))
    assert set(outcomes) == {PageState.FREE, PageState.SEALED}


_CHURN = """
import random, sys, numpy as np, xxhash
from kvstore.pool.pages import PageState
from kvstore.pool.segment import Segment
segment = Segment.open(int(sys.argv[1]))
table, number = segment.page_table(), int(sys.argv[2])
draw = random.Random(number)
print("churning", flush=True)
while True:
    number += 1
    page = draw.randrange(segment.num_pages)
    if table.state(page) is PageState.SEALED:
        table.free(page)
    table.reserve(page)
    for layer in range(segment.layout.num_layers):
        view = segment.layer_view(page, layer)
        view[:] = (number.to_bytes(8, "little") + bytes([layer]) * 8) * (len(view) // 16)
        checksum = xxhash.xxh3_64_intdigest(view).to_bytes(8, "little")
        table.set_checksums(page, range(layer, layer + 1), checksum)
    table.seal(page, number.to_bytes(16, "little"), number)
"""


def test_process_killed_at_any_instant_leaves_no_torn_sealed_page(segment_fd: int, tmp_path: Path) -> None:
    segment = Segment.format(segment_fd, FINGERPRINT, LAYOUT)
    script = tmp_path / "churn.py"
    script.write_text(_CHURN)
    table = segment.page_table()
    for first_number, num_stored in ((0, 1), (100_000, 200), (200_000, 333), (300_000, 470)):
        child = subprocess.Popen(
            [sys.executable, str(script), str(segment_fd), str(first_number)],
            pass_fds=[segment_fd],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"churning\n"
        while table.last_uses.max() < first_number + num_stored:
            assert child.poll() is None
        child.kill()
        child.wait()
        child.stdout.close()
        num_used = segment.num_pages - table.count()[PageState.FREE]
        adopted = table.adopt().sealed
        assert len(adopted) >= num_used - 1, "more is lost than the page in the works"
        for page in adopted:
            number = int.from_bytes(table.key(page), "little")
            assert table.is_intact(page)
            for layer in LAYERS:
                view = segment.layer_view(page, layer)
                assert view[:8] == number.to_bytes(8, "little")
                checksum = xxhash.xxh3_64_intdigest(view).to_bytes(8, "little")
                assert table.checksums(page, range(layer, layer + 1)) == checksum
    assert table.count()[PageState.SEALED] > 0
