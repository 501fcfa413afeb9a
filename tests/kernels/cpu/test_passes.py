"""Descriptions of passes: what is written is read, and a peer's numbers allocate nothing."""

import numpy as np
import pytest

from kernels.cpu.passes import described_bytes, read_pass, write_pass

PAGE_SIZE = 8
MOST = 2**31 - 1


def ints() -> np.ndarray:
    """Room for three sequences with five pages in all."""
    return np.zeros(described_bytes(3, 5) // 4, np.int32)


def test_what_is_written_is_read() -> None:
    described = ints()
    tables = [np.arange(3), np.arange(3, 5)]
    write_pass(described, range(2, 5), [1, 9], [17, 9], tables, PAGE_SIZE)
    read = read_pass(described, 7)
    assert (read.number, read.layers, read.query_lens, read.kv_lens) == (7, range(2, 5), [1, 9], [17, 9])
    assert [table.tolist() for table in read.page_tables] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("num_sequences", "lens"),
    [
        (0, []),
        (-1, [1, 1, 1]),
        (MOST, [1, 1, 1]),
        (-MOST, [1, 1, 1]),
        (1, [0, 0, 1]),
        (1, [0, 1, 1]),
        (1, [2, 1, 1]),
        (1, [-1, 1, 1]),
        (1, [1, 1, 0]),
        (1, [1, 1, -1]),
        (1, [1, MOST, MOST]),
        (2, [1, 1, 1, 1, MOST, 4 - MOST]),
        (2, [1, 1, 1, 1, MOST, MOST]),
        (3, [1, 1, 1, 16, 16, 16, 2, 2, 2]),
    ],
)
def test_lengths_that_no_pass_has_are_refused(num_sequences: int, lens: list[int]) -> None:
    """`lens` are the numbers of new tokens, of all tokens, and of pages."""
    described = ints()
    described[: 4 + len(lens)] = [num_sequences, 0, 0, 1, *lens]
    with pytest.raises(ValueError, match="sequences"):
        read_pass(described, 1)
