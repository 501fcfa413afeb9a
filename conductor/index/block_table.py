"""A table from block keys to numbers, for all blocks of all pools: some tens of millions.

The compiled table (`block_table.cpp`) takes 23 to 46 bytes a block, and does not pause while it grows.
Without a compiler a dict is used. It takes about 100 bytes a block, and pauses for up to a second while it
grows by millions.

Owns: both tables. Does not know: the meaning of the numbers.
"""

import ctypes
import functools
import itertools
import logging
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from mooncake.messages.blocks import KEY_BYTES, BlockKey
from mooncake.native import NativeCodeError, load

ABSENT = 0
"""The number that stands for a key that is not in the table."""
SWEPT_PLACES = 4096
"""The number of entries that one call of `sweep` examines, in some 10 microseconds."""
log = logging.getLogger(__name__)


class BlockTable(Protocol):
    """The interface of a table from block keys to numbers, which begin at 1.

    Every key must have `KEY_BYTES` bytes. A call with other keys may raise ValueError.
    """

    def __len__(self) -> int: ...

    def find(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Return the number that the table has for each key; `ABSENT` for a key that is not in the table."""

    def runs(self, keys: Sequence[BlockKey]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the runs of equal numbers before the first absent key.

        The first sequence has the number of each run. The second one has the index behind each run's last
        key. For keys with the numbers 5, 5 and 7 the result is `([5, 7], [2, 3])`.
        """

    def set(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> None:
        """Set the number of each of these keys, which must differ. The number `ABSENT` drops its key."""

    def sweep(self, is_marked: "array[int]") -> Sequence[int]:
        """Examine the next part of the keys, and drop each key whose number is marked.

        Repeated calls examine all keys.

        Args:
            is_marked: A flag for each number; the number is marked if its flag is not 0.

        Returns:
            The numbers of the dropped keys.
        """


class NativeTable:
    """The compiled table. Its constructor raises NativeCodeError if nothing can be compiled here."""

    def __init__(self) -> None:
        self._code = _native()
        self._table = self._code.table_new()
        weakref.finalize(self, self._code.table_free, self._table)
        self._removed = array("i", bytes(4 * SWEPT_PLACES))
        self._numbers, self._ends = array("i"), array("i")
        """Buffers for runs, as long as the longest prompt so far."""

    def __len__(self) -> int:
        return int(self._code.table_len(self._table))

    def find(self, keys: Sequence[BlockKey]) -> "array[int]":
        numbers = array("i", bytes(4 * len(keys)))
        self._code.table_find(self._table, _joined(keys), len(keys), numbers.buffer_info()[0])
        return numbers

    def runs(self, keys: Sequence[BlockKey]) -> tuple["array[int]", "array[int]"]:
        num_keys, numbers, ends = len(keys), self._numbers, self._ends
        if num_keys > len(numbers):
            self._numbers = numbers = array("i", bytes(4 * num_keys))
            self._ends = ends = array("i", bytes(4 * num_keys))
        num_runs = self._code.table_runs(
            self._table, _joined(keys), num_keys, numbers.buffer_info()[0], ends.buffer_info()[0]
        )
        return numbers[:num_runs], ends[:num_runs]

    def set(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> None:
        values = array("i", numbers)
        assert len(values) == len(keys)
        self._code.table_set(self._table, _joined(keys), len(keys), values.buffer_info()[0])

    def sweep(self, is_marked: "array[int]") -> "array[int]":
        num_removed = self._code.table_sweep(
            self._table, SWEPT_PLACES, is_marked.buffer_info()[0], self._removed.buffer_info()[0]
        )
        return self._removed[:num_removed]


class DictTable:
    """The table as a dict. The garbage collector skips this dict, as it contains only bytes and ints."""

    def __init__(self) -> None:
        self._numbers: dict[BlockKey, int] = {}
        self._unswept: Iterator[BlockKey] = iter(())

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        get = self._numbers.get
        return [get(key, ABSENT) for key in keys]

    def runs(self, keys: Sequence[BlockKey]) -> tuple[list[int], list[int]]:
        numbers: list[int] = []
        ends: list[int] = []
        for position, key in enumerate(keys):
            number = self._numbers.get(key, ABSENT)
            if number == ABSENT:
                break
            if numbers and numbers[-1] == number:
                ends[-1] = position + 1
            else:
                numbers.append(number)
                ends.append(position + 1)
        return numbers, ends

    def set(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> None:
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"expected keys of {KEY_BYTES} bytes")
        self._numbers.update(zip(keys, numbers, strict=True))
        if ABSENT in numbers:
            for key, number in zip(keys, numbers, strict=True):
                if number == ABSENT:
                    del self._numbers[key]

    def sweep(self, is_marked: "array[int]") -> list[int]:
        keys = list(itertools.islice(self._unswept, SWEPT_PLACES))
        if not keys:
            self._unswept = iter(list(self._numbers))
        removed = [key for key in keys if is_marked[self._numbers.get(key, ABSENT)]]
        return [self._numbers.pop(key) for key in removed]


def new_block_table() -> BlockTable:
    """Return the compiled table, or a dict if nothing can be compiled here."""
    try:
        return NativeTable()
    except NativeCodeError as error:
        log.warning("the prefix index uses a dict, which is slower and pauses while it grows: %s", error)
        return DictTable()


def _joined(keys: Sequence[BlockKey]) -> bytes:
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise ValueError(f"expected {len(keys)} keys of {KEY_BYTES} bytes, got {len(joined)} bytes")
    return joined


@functools.cache
def _native() -> ctypes.PyDLL:
    """Return the compiled code as a library.

    Calls keep the GIL, because taking it back from another thread could take milliseconds.
    """
    library = load(Path(__file__).with_name("block_table.cpp"))
    code = ctypes.PyDLL(library._name, handle=library._handle)
    table, size, pointer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    code.table_new.restype = table
    code.table_free.argtypes = [table]
    code.table_free.restype = None
    code.table_len.argtypes = [table]
    code.table_len.restype = ctypes.c_int64
    code.table_find.argtypes = [table, ctypes.c_char_p, size, pointer]
    code.table_find.restype = None
    code.table_runs.argtypes = [table, ctypes.c_char_p, size, pointer, pointer]
    code.table_runs.restype = size
    code.table_set.argtypes = [table, ctypes.c_char_p, size, pointer]
    code.table_set.restype = None
    code.table_sweep.argtypes = [table, size, pointer, pointer]
    code.table_sweep.restype = size
    return code
