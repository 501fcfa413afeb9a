"""Slices become work requests: checked against a byte-by-byte model."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.rdma.errors import RdmaError
from messenger.rdma.work import MAX_CHAIN, MAX_CHAIN_BYTES, Pieces, cut
from messenger.transport.transports import Remedy

MEMORY_BYTES = 1000
slices_in_memory = st.lists(
    st.tuples(
        st.integers(0, MEMORY_BYTES - 100), st.integers(0, 300).map(lambda n: 5000 + n), st.integers(0, 100)
    ),
    max_size=20,
)


@dataclass
class Memory:
    address: int
    size_bytes: int = MEMORY_BYTES


def bytes_moved(pieces: Pieces) -> list[tuple[int, int, int]]:
    return [
        (local + n, remote + n, key)
        for local, remote, num_bytes, key in zip(*pieces, strict=True)
        for n in range(num_bytes)
    ]


@given(slices=slices_in_memory, max_piece_bytes=st.integers(1, 50))
def test_every_byte_goes_where_it_should_in_order(
    slices: list[tuple[int, int, int]], max_piece_bytes: int
) -> None:
    keys = [number // 3 for number in range(len(slices))]
    pieces = cut(slices, keys, Memory(70_000), max_piece_bytes)
    assert bytes_moved(pieces) == [
        (70_000 + local + n, remote + n, key)
        for (local, remote, num_bytes), key in zip(slices, keys, strict=True)
        for n in range(num_bytes)
    ]
    assert all(0 < num_bytes <= max_piece_bytes for num_bytes in pieces.num_bytes)


def test_neighbours_on_both_sides_become_one_request() -> None:
    pieces = cut([(0, 50, 10), (10, 60, 10), (20, 70, 5), (25, 90, 5), (40, 95, 5)], 7, Memory(0), 1000)
    assert pieces == Pieces([0, 25, 40], [50, 90, 95], [25, 5, 5], [7, 7, 7])


def test_neighbours_with_different_keys_stay_apart() -> None:
    pieces = cut([(0, 50, 10), (10, 60, 10), (20, 70, 5)], [7, 8, 8], Memory(0), 1000)
    assert pieces == Pieces([0, 10], [50, 60], [10, 15], [7, 8])


def test_arrays_are_taken_as_they_are() -> None:
    slices = np.array([[1, 2, 3], [10, 20, 30]], dtype=np.uint64)
    assert cut(slices, 5, Memory(100), 1000) == Pieces([101, 110], [2, 20], [3, 30], [5, 5])


@pytest.mark.parametrize("keys", [-1, 1 << 32, 1 << 64, [1], [1, 2, 3], [1, 1 << 32]])
def test_key_that_is_none_is_refused(keys: int | list[int]) -> None:
    with pytest.raises(RdmaError) as caught:
        cut([(0, 0, 10), (20, 20, 10)], keys, Memory(0), 100)
    assert caught.value.remedy is Remedy.GIVE_UP


@pytest.mark.parametrize(
    "wrong",
    [
        (-1, 0, 1),
        (0, -1, 1),
        (0, 0, -1),
        (MEMORY_BYTES, 0, 1),
        (MEMORY_BYTES - 5, 0, 6),
        (1 << 62, 0, 1 << 62),
        (0, 1 << 64, 1),
        (0, 1 << 63, 1),
    ],
)
def test_slice_outside_the_memory_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(RdmaError) as caught:
        cut([(0, 0, 10), wrong], 1, Memory(0), 100)
    assert caught.value.remedy is Remedy.GIVE_UP


@given(
    num_bytes=st.lists(st.integers(1, MAX_CHAIN_BYTES + 10), min_size=1, max_size=60),
    max_pieces=st.integers(1, 30),
)
def test_chains_cover_all_pieces_and_stay_small(num_bytes: list[int], max_pieces: int) -> None:
    zeros = [0] * len(num_bytes)
    pieces, begin = Pieces(zeros, zeros, num_bytes, zeros), 0
    while begin < len(num_bytes):
        end = pieces.chain_end(begin, max_pieces)
        assert begin < end <= begin + min(max_pieces, MAX_CHAIN)
        assert end == begin + 1 or sum(num_bytes[begin:end]) <= MAX_CHAIN_BYTES
        begin = end
    assert begin == len(num_bytes)
