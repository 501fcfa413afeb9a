"""Decoder layers that a helper computes for the owner of the sequences (BanaServe, section 4.1, figure 3).

Both processes have a mailbox, in which the owner of the sequences describes a pass and puts the hidden states
that enter these layers. The helper computes the layers with its own weights, and replaces these hidden states
by the output of the layers. Bytes exchanged for each token: two rows of hidden states.

Up to `NUM_SLOTS` passes are in the mailbox at a time, so that both sides compute at once. The helper answers
them in order.

Owns: the layout of this mailbox, both ends. Does not know: how layers are computed, how memory is shared.
"""

from collections.abc import Sequence
from ctypes import c_int64, c_uint32
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.library import Library
from kernels.cpu.mailbox import COUNTERS_BYTES, Mailbox, Wire, aligned
from kernels.cpu.passes import HostedPass, described_bytes, read_pass, write_pass

NUM_SLOTS = 2
"""Passes in the mailbox at the same time: the two micro-batches of a decode pipeline."""


@dataclass(frozen=True, slots=True)
class LayersShape:
    """The sizes of a mailbox, which limit the passes that the mailbox can hold."""

    num_tokens: int
    """New tokens of a pass, over all its sequences."""
    num_sequences: int
    num_pages: int
    """Pages of a pass, over all its sequences."""
    hidden_size: int
    dtype: torch.dtype

    @property
    def rows_offset(self) -> int:
        """The offset in bytes of the hidden states in a slot; the description of the pass comes first."""
        return aligned(described_bytes(self.num_sequences, self.num_pages))

    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot, whole memory pages."""
        return self.rows_offset + aligned(self.num_tokens * self.hidden_size * self.dtype.itemsize)

    @property
    def size_bytes(self) -> int:
        """The bytes of the mailbox, whole memory pages."""
        return COUNTERS_BYTES + NUM_SLOTS * self.slot_bytes


class _LayersMailbox(Mailbox):
    """One end of a mailbox for layers; `shape` has its sizes."""

    def __init__(self, library: Library, memory: torch.Tensor, shape: LayersShape, wire: Wire | None) -> None:
        super().__init__(library, memory, shape.size_bytes, wire)
        self.shape = shape

    def _ints(self, number: int) -> np.ndarray:
        """Return a view of the memory of a pass's description, as int32."""
        start = self._start(number)
        ints: np.ndarray = self._memory[start : start + self.shape.rows_offset].numpy().view(np.int32)
        return ints

    def _rows(self, number: int, num_tokens: int) -> torch.Tensor:
        """Return a view of the hidden states of a pass, `[num_tokens, hidden_size]`."""
        start, num_bytes = self._rows_span(number, num_tokens)
        rows = self._memory[start : start + num_bytes].view(self.shape.dtype)
        return rows.view(-1, self.shape.hidden_size)

    def _rows_span(self, number: int, num_tokens: int) -> tuple[int, int]:
        """Return the offset of a pass's hidden states, and their number of bytes."""
        start = self._start(number) + self.shape.rows_offset
        return start, num_tokens * self.shape.hidden_size * self.shape.dtype.itemsize

    def _start(self, number: int) -> int:
        return COUNTERS_BYTES + number % NUM_SLOTS * self.shape.slot_bytes


class LayersOwner(_LayersMailbox):
    """The owner's end of a mailbox for layers, for one thread.

    `timeout_s`: seconds that the helper may take for a layer.
    """

    def __init__(
        self,
        library: Library,
        memory: torch.Tensor,
        shape: LayersShape,
        timeout_s: float,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(library, memory, shape, wire)
        self._timeout_ms = c_int64(round(1000 * timeout_s))
        self._asked: dict[int, int] = {}
        """Number of tokens of each pass whose answer has not been taken yet.

        The key is the pass's number.
        """
        self._num_passes = 0

    def ask(
        self,
        layers: range,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        page_tables: Sequence[np.ndarray],
        page_size: int,
        hidden: torch.Tensor,
    ) -> int:
        """Send a pass over `layers` to the helper, with the states `hidden` [T, hidden_size] that enter them.

        The other arguments describe the sequences, as in `HostedPass`. Returns the pass's number.

        Raises ValueError for a pass that is too long, or if the answer of the earlier pass in the same slot
        of the mailbox has not been taken.
        """
        shape = self.shape
        num_pages = sum(-(-kv_len // page_size) for kv_len in kv_lens)
        if (
            len(hidden) > shape.num_tokens
            or len(query_lens) > shape.num_sequences
            or num_pages > shape.num_pages
        ):
            raise ValueError(
                f"expected a pass of at most {shape.num_tokens} tokens of {shape.num_sequences} sequences in "
                f"{shape.num_pages} pages, got {len(hidden)}, {len(query_lens)} and {num_pages}"
            )
        number = self._num_passes + 1
        if any(asked % NUM_SLOTS == number % NUM_SLOTS for asked in self._asked):
            raise ValueError(f"pass {number} needs a slot whose answer has not been taken")
        self._num_passes = number
        self._asked[number] = len(hidden)
        self._rows(number, len(hidden)).copy_(hidden)
        self._show(*self._rows_span(number, len(hidden)))
        num_bytes = write_pass(self._ints(number), layers, query_lens, kv_lens, page_tables, page_size)
        self._begin_pass(self._start(number), num_bytes)
        return number

    def take(self, number: int) -> torch.Tensor:
        """Return the hidden states that leave the layers of a pass, `[T, hidden_size]`. Blocks.

        Raises HelperLost if the helper does not answer in time or has closed the mailbox, and then for each
        later pass too.
        """
        num_tokens = self._asked.pop(number)
        if self.is_closed or not self._code.await_answer(self._address, c_uint32(number), self._timeout_ms):
            raise self.lost()
        return self._rows(number, num_tokens).clone()


class LayersHelper(_LayersMailbox):
    """The helper's end of a mailbox for layers, for one thread."""

    def __init__(
        self,
        library: Library,
        memory: torch.Tensor,
        shape: LayersShape,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(library, memory, shape, wire)
        self._num_passes = self._num_tokens = 0

    def await_pass(self) -> tuple[HostedPass, torch.Tensor] | None:
        """Wait for the next pass, and return it with a view of its hidden states `[T, hidden_size]`. Blocks.

        Returns None when the exchange is closed.

        Raises ValueError for impossible lengths, or for more tokens than fit.
        """
        if not self._code.await_pass(self._address, c_uint32(self._num_passes)):
            return None
        self._num_passes = number = self._num_passes + 1
        described = read_pass(self._ints(number), number)
        num_tokens = sum(described.query_lens)
        if not 0 < num_tokens <= self.shape.num_tokens:
            raise ValueError(f"expected a pass of at most {self.shape.num_tokens} tokens, got {num_tokens}")
        self._num_tokens = num_tokens
        return described, self._rows(number, num_tokens)

    def answer(self) -> None:
        """Tell the owner that the pass's hidden states in the mailbox are now the output of the layers."""
        self._answer_pass(*self._rows_span(self._num_passes, self._num_tokens))
