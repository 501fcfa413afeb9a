"""The messages between an owner of modules and its helper over a Unix socket, and shared memory.

The first message of a connection is `HostModules`. With the answer `Hosting` comes the descriptor of the
shared memory. Either side ends the hosting by closing the connection, as its end by any cause does.

Owns: this vocabulary, the layout of the memory. Does not know: sockets, pages in use.
"""

import mmap

import msgspec
import torch

from mooncake.messages.migration import LayerRange
from mooncake.messages.quantities import Count, PositiveCount
from mooncake.node.mapping import HUGE_PAGE_BYTES, MappedFile

LINK_VERSION = 3
"""The version of these messages, of the layout of the memory, and of the exchange in it."""
LONGEST_MESSAGE_BYTES = 1 << 16


class HostModules(msgspec.Struct, tag="HostHeads", frozen=True):
    """Host all heads of `layers`, or the last `num_heads` KV heads of all layers. Answered by `Hosting` or
    `HostingRefused`.

    The helper must have memory for at least `least_pages` pages of these modules, and should have it for
    `wanted_pages`. A pass has at most `most_tokens` new tokens and `most_sequences` sequences.
    """

    version: int
    owner: str
    fingerprint: str
    num_heads: Count
    layers: LayerRange | None
    least_pages: PositiveCount
    wanted_pages: PositiveCount
    most_tokens: PositiveCount
    most_sequences: PositiveCount

    @property
    def what(self) -> str:
        """The part of the model that is to be hosted, for people."""
        return f"{self.num_heads} of the KV heads" if self.layers is None else f"layers {self.layers}"


class Hosting(msgspec.Struct, tag=True, frozen=True):
    """The answer that the helper hosts the modules, in `num_pages` pages."""

    num_pages: PositiveCount


class HostingRefused(msgspec.Struct, tag=True, frozen=True):
    """The answer that the helper does not host the modules."""

    reason: str


FromHelper = Hosting | HostingRefused


class SharedMemory:
    """The layout of the shared memory: a mailbox, and pages, layer by layer."""

    def __init__(
        self, mailbox_bytes: int, layer_shape: tuple[int, ...], num_layers: int, dtype: torch.dtype
    ) -> None:
        """Describe the memory of `num_layers` layers. `layer_shape` is `[num_pages, num_heads, 2, page_size,
        head_dim]`."""
        self._mailbox_bytes, self._layer_shape = mailbox_bytes, layer_shape
        self._layer_bytes = _aligned(torch.Size(layer_shape).numel() * dtype.itemsize, mmap.PAGESIZE)
        self._first_layer = _aligned(mailbox_bytes, HUGE_PAGE_BYTES)
        self._num_layers, self._dtype = num_layers, dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole memory."""
        return self._first_layer + self._num_layers * self._layer_bytes

    def map(self, fd: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Map the memory. Return the mailbox, uint8 `[mailbox_bytes]`, and each layer's pages, which keep it
        mapped. Raises OSError."""
        memory = torch.frombuffer(MappedFile(fd, self.size_bytes).view, dtype=torch.uint8)
        layers = []
        for number in range(self._num_layers):
            start = self._first_layer + number * self._layer_bytes
            num_bytes = torch.Size(self._layer_shape).numel() * self._dtype.itemsize
            layers.append(memory[start : start + num_bytes].view(self._dtype).view(self._layer_shape))
        return memory[: self._mailbox_bytes], layers


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
