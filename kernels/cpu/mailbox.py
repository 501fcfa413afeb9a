"""A mailbox in memory that the owner of sequences and its helper share (moved_heads.h): counters and wakes.

Owns: the counters at its beginning. Does not know: what lies behind them, how memory is shared.
"""

from ctypes import c_void_p

import torch

from kernels.cpu.library import Library

COUNTERS_BYTES = 4096
"""Bytes at the beginning of a mailbox for its counters."""
_ALIGNMENT_BYTES = 4096


class HelperLost(RuntimeError):
    """The helper has not answered in time: the pass has no result, and its tokens have no KVCache."""


class Mailbox:
    """One end of a mailbox in `memory`, uint8 `[size_bytes]`, all zeros at first. Keeps the memory mapped."""

    def __init__(self, library: Library, memory: torch.Tensor, size_bytes: int) -> None:
        if memory.dtype is not torch.uint8 or memory.shape != (size_bytes,):
            raise ValueError(f"expected {size_bytes} bytes, got {memory.dtype} {list(memory.shape)}")
        self._memory, self._code = memory, library.code
        self._address = c_void_p(memory.data_ptr())
        self.counters_address = memory.data_ptr()
        """Address of the counters, for C++ code."""

    @property
    def is_closed(self) -> bool:
        """Whether either end has closed the mailbox."""
        return bool(self._code.mailbox_is_closed(self._address))

    def close(self) -> None:
        """End the exchange for both sides: a waiting side stops waiting. Idempotent."""
        self._code.close_mailbox(self._address)

    def lost(self) -> HelperLost:
        """End the exchange, as the helper has not answered: a later pass may need the KVCache of this one.

        Returns the error to raise.
        """
        self.close()
        return HelperLost("the helper that has some of the heads or layers does not answer")


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole memory pages."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
