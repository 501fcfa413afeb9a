"""The messages between the owner of heads and their helper over a Unix socket, and the memory they share.

The first message of a connection is `HostHeads`. With the answer `Hosting` comes the descriptor of the shared
memory. Either side ends the hosting by closing the connection, as its end by any cause does.

Owns: this vocabulary, the layout of the memory. Does not know: sockets, pages in use.
"""

import mmap

import msgspec
import torch

from kernels.cpu.attention import Heads
from kernels.cpu.moved_heads import MailboxShape
from mooncake.messages.quantities import Count, PositiveCount
from mooncake.node.mapping import HUGE_PAGE_BYTES, MappedFile

LINK_VERSION = 1
"""Version of these messages, of the memory's layout and of what is exchanged there."""
LONGEST_MESSAGE_BYTES = 1 << 16


class HostHeads(msgspec.Struct, tag=True, frozen=True):
    """Host the last `num_heads` KV heads of all layers. Answered by `Hosting` or `HostingRefused`.

    There must be room for `least_pages` pages of them, and `wanted_pages` are better.
    A pass has at most `most_tokens` new tokens and `most_sequences` sequences.
    """

    version: int
    owner: str
    fingerprint: str
    num_heads: PositiveCount
    least_pages: PositiveCount
    wanted_pages: PositiveCount
    most_tokens: PositiveCount
    most_sequences: PositiveCount


class Hosting(msgspec.Struct, tag=True, frozen=True):
    """The helper hosts the heads of so many pages."""

    num_pages: PositiveCount


class HostingRefused(msgspec.Struct, tag=True, frozen=True):
    """The helper does not host the heads."""

    reason: str


FromHelper = Hosting | HostingRefused


class SharedHeads:
    """The layout of the shared memory: a mailbox, and the pages of the moved heads, layer by layer."""

    def __init__(
        self, request: HostHeads, num_pages: Count, heads: Heads, page_size: int, num_layers: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`heads` are all heads of the model."""
        moved = heads.last(request.num_heads)
        self.mailbox = MailboxShape(request.most_tokens, request.most_sequences, num_pages, moved, dtype)
        self._layer_shape = (num_pages, moved.num_kv_heads, 2, page_size, moved.head_dim)
        self._layer_bytes = _aligned(torch.Size(self._layer_shape).numel() * dtype.itemsize, mmap.PAGESIZE)
        self._first_layer = _aligned(self.mailbox.size_bytes, HUGE_PAGE_BYTES)
        self._num_layers, self._dtype = num_layers, dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole memory."""
        return self._first_layer + self._num_layers * self._layer_bytes

    def map(self, fd: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Map the memory. Return the mailbox, uint8 `[mailbox.size_bytes]`, and the pages of each layer,
        `[num_pages, num_heads, 2, page_size, head_dim]`, which keep it mapped. Raises OSError."""
        memory = torch.frombuffer(MappedFile(fd, self.size_bytes).view, dtype=torch.uint8)
        layers = []
        for number in range(self._num_layers):
            start = self._first_layer + number * self._layer_bytes
            num_bytes = torch.Size(self._layer_shape).numel() * self._dtype.itemsize
            layers.append(memory[start : start + num_bytes].view(self._dtype).view(self._layer_shape))
        return memory[: self.mailbox.size_bytes], layers


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
