"""A part of attention in a helper's process (moved_attention.h; BanaServe, section 4.1, figure 4).

Both processes have a mailbox (`kernels.cpu.mailbox`), in which the owner of the sequences describes each pass
and asks for the attention of each layer. The helper has one of two parts:

- The last KV heads. The helper's attention reads and writes their pages. Bytes exchanged for each token and
  layer: queries, keys and values to the helper, results back. The result is, bit for bit, that of attention
  over all heads in one process, as heads do not depend on each other.
- The first pages of some sequences, all of them full. Bytes exchanged for each layer and each token of these
  sequences: the queries of all heads to the helper; results, and the logarithms L of the softmaxes'
  denominators, back.

  The owner merges the results O1 and O2 of both processes by their logarithms L1 and L2. The attention of a
  head is exp(L1 - L) O1 + exp(L2 - L) O2 with L = log(exp L1 + exp L2). One process would add up in another
  order, so the bits differ.

Owns: the layout of a mailbox, both ends of the exchange. Does not know: processes, how memory is shared.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.attention import AttentionShape, PagedAttention
from kernels.cpu.library import Library
from kernels.cpu.mailbox import COUNTERS_BYTES, Mailbox, Wire, aligned
from kernels.cpu.passes import HostedPass, described_bytes, read_pass, write_pass

_LSE_BYTES = 4


class _Exchange(ctypes.Structure):
    """The C++ `struct Exchange` of moved_attention.h."""

    _fields_ = (
        ("mailbox", c_void_p),
        ("asked", c_void_p),
        ("answers", c_void_p),
        ("tokens", c_void_p),
        ("num_tokens", c_int64),
        ("lse", c_void_p),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("timeout_ms", c_int64),
    )


class _HostedLayer(ctypes.Structure):
    """The C++ `struct HostedLayer` of moved_attention.h."""

    _fields_ = (("batch", c_void_p), ("kv", c_void_p))


@dataclass(frozen=True, slots=True)
class MailboxShape:
    """The sizes of a mailbox: the longest pass that it can describe, and the heads of the helper."""

    num_tokens: int
    """New tokens of a pass, over all its sequences."""
    num_sequences: int
    num_pages: int
    """Pages of a pass at the helper, over all its sequences."""
    heads: AttentionShape
    """The heads whose attention the helper computes."""
    dtype: torch.dtype
    has_keys: bool = False
    """Whether the helper has the first pages of sequences, with all heads; False: the last heads."""

    @property
    def moved_heads(self) -> AttentionShape | None:
        """The heads that the helper alone has; None if the helper has the first pages of sequences."""
        return None if self.has_keys else self.heads

    @property
    def row_elements(self) -> int:
        """The elements of a token's request row: queries, and keys and values of moved heads."""
        num_written = 0 if self.has_keys else 2 * self.heads.num_kv_heads
        return (self.heads.num_heads + num_written) * self.heads.head_dim

    @property
    def asked_offset(self) -> int:
        """The offset in bytes of the request rows."""
        return COUNTERS_BYTES + aligned(described_bytes(self.num_sequences, self.num_pages))

    @property
    def answers_offset(self) -> int:
        """The offset in bytes of the results."""
        return self.asked_offset + aligned(self.num_tokens * self.row_elements * self.dtype.itemsize)

    @property
    def size_bytes(self) -> int:
        """The bytes of the mailbox, whole memory pages."""
        lse_bytes = _LSE_BYTES if self.has_keys else 0
        row_bytes = self.heads.num_heads * (self.heads.head_dim * self.dtype.itemsize + lse_bytes)
        return self.answers_offset + aligned(self.num_tokens * row_bytes)


class _AttentionMailbox(Mailbox):
    """One end of a mailbox for attention; `shape` has its sizes."""

    def __init__(
        self, library: Library, memory: torch.Tensor, shape: MailboxShape, wire: Wire | None
    ) -> None:
        super().__init__(library, memory, shape.size_bytes, wire)
        self.shape = shape
        self._ints = memory[COUNTERS_BYTES : shape.asked_offset].numpy().view(np.int32)
        self._asked_address = memory.data_ptr() + shape.asked_offset
        self._answers_address = memory.data_ptr() + shape.answers_offset


class AttentionOwner(_AttentionMailbox):
    """The owner's end of a mailbox for attention.

    `timeout_s`: seconds that the helper may take for a layer.
    """

    def __init__(
        self,
        library: Library,
        memory: torch.Tensor,
        shape: MailboxShape,
        timeout_s: float,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(library, memory, shape, wire)
        heads = shape.heads
        self._tokens = np.empty(0, np.int64)
        self._lse = torch.empty((shape.num_tokens if shape.has_keys else 0, heads.num_heads))
        self._exchange = _Exchange(
            self._address,
            self._asked_address,
            self._answers_address,
            None,
            0,
            self._lse.data_ptr() if shape.has_keys else None,
            heads.num_heads,
            0 if shape.has_keys else heads.num_kv_heads,
            round(1000 * timeout_s),
        )
        self.address = ctypes.addressof(self._exchange)
        """Address of the exchange, for C++ code that asks."""

    def begin(
        self,
        layers: range,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_tables: Sequence[np.ndarray],
        page_size: int,
        tokens: np.ndarray | None = None,
    ) -> None:
        """Describe the next pass, over `layers`, to the helper.

        If the helper has the first pages of sequences, only these sequences are described, and their page
        tables name only the pages at the helper, all of them full. `tokens`, int64, are then the rows of the
        sequences' new tokens in the pass. Raises ValueError for a pass that is too long, and HelperLost if
        the mailbox is closed.
        """
        if self.is_closed:
            raise self.lost()
        shape = self.shape
        nums_pages = [
            min(len(table), -(-kv_len // page_size))
            for kv_len, table in zip(kv_lens, page_tables, strict=True)
        ]
        num_sequences, num_tokens, num_pages = len(query_lens), sum(query_lens), sum(nums_pages)
        if (
            num_tokens > shape.num_tokens
            or num_sequences > shape.num_sequences
            or num_pages > shape.num_pages
        ):
            raise ValueError(
                f"expected a pass of at most {shape.num_tokens} tokens of {shape.num_sequences} sequences in "
                f"{shape.num_pages} pages, got {num_tokens}, {num_sequences} and {num_pages}"
            )
        if shape.has_keys:
            if tokens is None or len(tokens) != num_tokens or tokens[-1] >= shape.num_tokens:
                raise ValueError(f"expected {num_tokens} rows below {shape.num_tokens}, got {tokens}")
            self._tokens = tokens  # the C++ code reads them by address
            self._exchange.tokens, self._exchange.num_tokens = tokens.ctypes.data, num_tokens
        num_bytes = write_pass(self._ints, layers, query_lens, kv_lens, page_tables, page_size)
        self._begin_pass(COUNTERS_BYTES, num_bytes)


class AttentionHelper(_AttentionMailbox):
    """The helper's end of a mailbox for attention, for one thread.

    `kv_layers` are the hosted pages of the layers from 0 on, each `[num_pages, num_kv_heads, 2, page_size,
    head_dim]`; `windows` are the layers' sliding windows in tokens.
    """

    def __init__(
        self,
        library: Library,
        memory: torch.Tensor,
        shape: MailboxShape,
        kv_layers: Sequence[torch.Tensor],
        windows: Sequence[int | None],
        wire: Wire | None = None,
    ) -> None:
        super().__init__(library, memory, shape, wire)
        self._library, self._kv_layers, self._windows = library, kv_layers, windows
        self._code.passes_begun.restype = c_uint32
        self._host_layers = library.function(
            "host_layers", shape.dtype, c_void_p, c_uint32, c_void_p, c_int64, *[c_void_p] * 2, c_int64,
            *[c_void_p] * 2,
        )  # fmt: skip
        self._num_passes = 0

    def await_pass(self) -> HostedPass | None:
        """Wait for the next pass, and return its description; None when the exchange is closed. Blocks.

        Raises ValueError for impossible lengths.
        """
        if not self._code.await_pass(self._address, c_uint32(self._num_passes)):
            return None
        self._num_passes = self._code.passes_begun(self._address)
        return read_pass(self._ints, self._num_passes)

    def host(self, described: HostedPass) -> None:
        """Answer each layer of a pass. Blocks until the pass is complete, or the owner has ended it.

        The owner ends a pass by beginning another pass, or by closing the mailbox.

        Raises ValueError for a pass that does not fit the hosted pages, and IndexError for layers that do not
        exist.
        """
        if not 0 <= described.layers.start <= described.layers.stop <= len(self._kv_layers):
            raise IndexError(f"expected some of {len(self._kv_layers)} layers, got {described.layers}")
        kv_shape, shape = self._kv_layers[0].shape, self.shape
        page_size, num_tokens = kv_shape[3], sum(described.query_lens)
        num_keys = [len(table) * page_size for table in described.page_tables] if shape.has_keys else None
        attentions: dict[int | None, PagedAttention] = {}
        for layer in described.layers:
            window = self._windows[layer]
            if window not in attentions:
                attentions[window] = PagedAttention(
                    self._library,
                    described.query_lens,
                    described.kv_lens,
                    described.page_tables,
                    kv_shape,
                    shape.heads,
                    window,
                    num_keys,
                )
        layers = (_HostedLayer * len(described.layers))(
            *(
                _HostedLayer(attentions[self._windows[layer]].address, self._kv_layers[layer].data_ptr())
                for layer in described.layers
            )
        )
        if num_tokens > shape.num_tokens:
            raise ValueError(f"expected a pass of at most {shape.num_tokens} tokens, got {num_tokens}")
        slots = None if shape.has_keys else described.slots(page_size)
        self._host_layers(
            self._address,
            described.number,
            ctypes.addressof(layers),
            len(layers),
            *((None, None) if slots is None else (slot.ctypes.data for slot in slots)),
            num_tokens,
            self._asked_address,
            self._answers_address,
        )
