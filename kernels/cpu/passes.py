"""The description of a forward pass in the mailbox of an owner and its helper.

Owns: the layout of a description. Does not know: what is computed in the pass, who reads it when.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_INT_BYTES = 4
_NUM_HEADER_INTS = 4
"""The number of integers before the lists: sequences, pages, first layer, end of layers."""
_NUM_LISTS = 3
"""The number of lists with an integer for each sequence: new tokens, all tokens, pages."""


@dataclass(frozen=True, slots=True)
class HostedPass:
    """A pass as its owner describes it.

    For each sequence, `query_lens` has the number of new tokens, `kv_lens` the number of all tokens, and
    `page_tables` the page table. A page table may end before the sequence's last tokens.
    """

    number: int
    layers: range
    query_lens: list[int]
    kv_lens: list[int]
    page_tables: list[np.ndarray]

    def slots(self, page_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pages and offsets of the new tokens, int64 `[T]` each."""
        pages, offsets = [], []
        for query_len, kv_len, table in zip(self.query_lens, self.kv_lens, self.page_tables, strict=True):
            positions = np.arange(kv_len - query_len, kv_len)
            pages.append(table[positions // page_size])
            offsets.append(positions % page_size)
        return np.concatenate(pages, dtype=np.int64), np.concatenate(offsets, dtype=np.int64)


def described_bytes(num_sequences: int, num_pages: int) -> int:
    """Return the bytes of the longest description of `num_sequences` sequences on `num_pages` pages."""
    return _INT_BYTES * (_NUM_HEADER_INTS + _NUM_LISTS * num_sequences + num_pages)


def write_pass(
    ints: np.ndarray,
    layers: range,
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_tables: Sequence[np.ndarray],
    page_size: int,
) -> int:
    """Write the description of a pass into `ints` (int32), which must have room for the description.

    Returns the description's number of bytes.
    """
    tables = [table[: -(-kv_len // page_size)] for table, kv_len in zip(page_tables, kv_lens, strict=True)]
    nums_pages = [len(table) for table in tables]
    header = [len(query_lens), sum(nums_pages), layers.start, layers.stop]
    described = np.concatenate(
        [header, query_lens, kv_lens, nums_pages, *tables], dtype=np.int32, casting="unsafe"
    )
    ints[: len(described)] = described
    return described.nbytes


def read_pass(ints: np.ndarray, number: int) -> HostedPass:
    """Return a copy of the description that `write_pass` has written. `number` is the pass's number.

    Raises ValueError for impossible lengths, or lengths for which `ints` has no room. The numbers of layers
    and pages are not checked.
    """
    num_sequences, _, first, end = ints[:_NUM_HEADER_INTS].tolist()
    lists = ints[_NUM_HEADER_INTS:].copy()
    end_of_lists = _NUM_LISTS * num_sequences
    if not 0 < end_of_lists <= len(lists):
        raise ValueError(f"{num_sequences} sequences in a pass")
    query_lens, kv_lens, nums_pages = lists[:end_of_lists].reshape(_NUM_LISTS, num_sequences).tolist()
    is_room = min(nums_pages) > 0 and end_of_lists + sum(nums_pages) <= len(lists)
    if not is_room or any(not 1 <= new <= kv for new, kv in zip(query_lens, kv_lens, strict=True)):
        raise ValueError(f"lengths of {num_sequences} sequences that no pass has")
    tables = np.split(lists[end_of_lists : end_of_lists + sum(nums_pages)], np.cumsum(nums_pages)[:-1])
    return HostedPass(number, range(first, end), query_lens, kv_lens, tables)
