"""The messages between an owner of modules and its helper, and the memory of the modules.

The first message of a connection is `HostModules`. On one host the answer `Hosting` comes with the descriptor
of the memory, which both sides share. Between hosts the owner opens two more connections, which `Join` the
hosting: one for passes, one for pages. The hosting ends with the first connection, which either side may
close.

Owns: this vocabulary, the layout of the memory. Does not know: sockets, pages in use.
"""

import enum
import mmap
from typing import NamedTuple

import msgspec
import torch

from mooncake.messages.migration import ModulesPart
from mooncake.messages.quantities import PositiveCount
from mooncake.node.mapping import HUGE_PAGE_BYTES, MappedFile
from workers.modules.remote_pages import PagesShape

LINK_VERSION = 4
"""The version of these messages, of the layout of the memory, and of the exchange in it."""
LONGEST_MESSAGE_BYTES = 1 << 16


class HostModules(msgspec.Struct, tag=True, frozen=True):
    """The request to host a part of the model. The answer is `Hosting` or `HostingRefused`.

    The helper must have memory for at least `least_pages` pages of these modules, and should have it for
    `wanted_pages`. A pass has at most `most_tokens` new tokens and `most_sequences` sequences.
    """

    version: int
    owner: str
    fingerprint: str
    part: ModulesPart
    least_pages: PositiveCount
    wanted_pages: PositiveCount
    most_tokens: PositiveCount
    most_sequences: PositiveCount


class Hosting(msgspec.Struct, tag=True, frozen=True):
    """The answer that the helper hosts the modules, in `num_pages` pages."""

    num_pages: PositiveCount
    token: bytes = b""
    """The name by which `Join` refers to this hosting; empty if owner and helper are on one host."""


class Purpose(enum.Enum):
    """The purpose of a connection that joins a hosting."""

    PASSES = "passes"
    """The stream between both sides' mailboxes (`kernels.cpu.mailbox.Wire`)."""
    PAGES = "pages"
    """Reads and writes of pages (`workers.modules.remote_pages`)."""


class Join(msgspec.Struct, tag=True, frozen=True):
    """The first message of a further connection of a hosting. Not answered."""

    token: bytes
    purpose: Purpose


class HostingRefused(msgspec.Struct, tag=True, frozen=True):
    """The answer that the helper does not host the modules."""

    reason: str


FromOwner = HostModules | Join
"""The first message of a connection."""
FromHelper = Hosting | HostingRefused


class Memory(NamedTuple):
    """The memory of modules: the mailbox, uint8 `[mailbox_bytes]`, and each layer's pages."""

    mailbox: torch.Tensor
    layers: list[torch.Tensor]


class MemoryLayout:
    """The layout of the memory of modules: a mailbox, and pages, layer by layer."""

    def __init__(
        self, mailbox_bytes: int, layer_shape: tuple[int, ...], num_layers: int, dtype: torch.dtype
    ) -> None:
        """Describe the memory of `num_layers` layers.

        `layer_shape` is `[num_pages, num_heads, 2, page_size, head_dim]`.
        """
        self.pages = PagesShape(num_layers, layer_shape, dtype)
        self._mailbox_bytes, self._layer_shape = mailbox_bytes, layer_shape
        self._layer_bytes = _aligned(torch.Size(layer_shape).numel() * dtype.itemsize, mmap.PAGESIZE)
        self._first_layer = _aligned(mailbox_bytes, HUGE_PAGE_BYTES)
        self._num_layers, self._dtype = num_layers, dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole memory."""
        return self._first_layer + self._num_layers * self._layer_bytes

    def map(self, fd: int) -> Memory:
        """Map the memory at `fd`. The tensors keep it mapped. Raises OSError."""
        memory = torch.frombuffer(MappedFile(fd, self.size_bytes).view, dtype=torch.uint8)
        layers = []
        for number in range(self._num_layers):
            start = self._first_layer + number * self._layer_bytes
            num_bytes = torch.Size(self._layer_shape).numel() * self._dtype.itemsize
            layers.append(memory[start : start + num_bytes].view(self._dtype).view(self._layer_shape))
        return Memory(memory[: self._mailbox_bytes], layers)

    def mailbox_alone(self) -> Memory:
        """Return a new mailbox of this process, all zeros, and layers that another host has.

        These layers are meta tensors, without memory here.
        """
        absent = torch.empty(self._layer_shape, dtype=self._dtype, device="meta")
        return Memory(torch.zeros(self._mailbox_bytes, dtype=torch.uint8), [absent] * self._num_layers)


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
