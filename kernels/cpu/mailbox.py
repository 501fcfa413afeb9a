"""A mailbox between an owner of sequences and its helper (mailbox.h): counters, and data behind them.

Either both processes map one mailbox, or each has a mailbox of its own and a stream connects the two.

Owns: the counters at the beginning of a mailbox, this process's end of the stream. Does not know: what lies
after the counters, how memory is shared.
"""

import socket
import weakref
from ctypes import c_int, c_int64, c_uint64, c_void_p
from typing import NamedTuple

import torch

from kernels.cpu.library import Library

COUNTERS_BYTES = 4096
"""Bytes at the beginning of a mailbox for its counters."""
_ALIGNMENT_BYTES = 4096


class HelperLost(RuntimeError):
    """The helper has not answered in time, or is gone. The pass has no result, and its tokens no KVCache."""


class Wire(NamedTuple):
    """A connected stream socket between two mailboxes.

    If the other side takes no bytes for `timeout_s` seconds while this side sends, the exchange is closed.
    With None as `timeout_s` there is no limit.
    """

    sock: socket.socket
    timeout_s: float | None


class Mailbox:
    """One end of a mailbox in `memory`, uint8 `[size_bytes]`, all zeros at first. Keeps the memory mapped.

    With a `wire`, the memory is this process's own. The wire's socket is closed when this object is freed.
    Raises ValueError for memory of another size or dtype.
    """

    def __init__(
        self, library: Library, memory: torch.Tensor, size_bytes: int, wire: Wire | None = None
    ) -> None:
        if memory.dtype is not torch.uint8 or memory.shape != (size_bytes,):
            raise ValueError(f"expected {size_bytes} bytes, got {memory.dtype} {list(memory.shape)}")
        self._memory, self._code = memory, library.code
        self._address = c_void_p(memory.data_ptr())
        self.counters_address = memory.data_ptr()
        """Address of the counters, for C++ code."""
        if wire is not None:
            weakref.finalize(self, wire.sock.close)
            timeout_ms = 0 if wire.timeout_s is None else max(1, round(1000 * wire.timeout_s))
            self._code.connect_mailbox(
                self._address, c_uint64(size_bytes), c_int(wire.sock.fileno()), c_int64(timeout_ms)
            )

    def _show(self, offset: int, num_bytes: int) -> None:
        """Send these bytes of the mailbox to the other side, if the two sides share no memory."""
        self._code.show_bytes(self._address, *self._span(offset, num_bytes))

    def _begin_pass(self, offset: int, num_bytes: int) -> None:
        """Tell the helper that a pass is described in these bytes."""
        self._code.begin_pass(self._address, *self._span(offset, num_bytes))

    def _answer_pass(self, offset: int, num_bytes: int) -> None:
        """Tell the owner that the results of a pass are in these bytes."""
        self._code.answer_pass(self._address, *self._span(offset, num_bytes))

    def _span(self, offset: int, num_bytes: int) -> tuple[c_void_p, c_uint64]:
        return c_void_p(self.counters_address + offset), c_uint64(num_bytes)

    @property
    def is_closed(self) -> bool:
        """Whether this end knows that the mailbox is closed.

        Over a stream, this end sees the other end's close only when it next receives.
        """
        return bool(self._code.mailbox_is_closed(self._address))

    def close(self) -> None:
        """End the exchange for both sides: a waiting side stops waiting. Idempotent."""
        self._code.close_mailbox(self._address)

    def lost(self) -> HelperLost:
        """End the exchange, as the helper has not answered, and return the error to raise.

        No pass may follow, as it may need KVCache that the unanswered pass has not written.
        """
        self.close()
        return HelperLost("the helper that has some of the modules does not answer")


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole memory pages."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
