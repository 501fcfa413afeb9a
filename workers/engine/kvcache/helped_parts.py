"""The parts of a model and its KVCache that a helper can have, at their owner (BanaServe, section 4.1).

Owns: copies of their pages, on this host or another one. Does not know: which pages are in use, how a part
comes to a helper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import torch

from kernels.cpu.hosted_layers import LayersOwner
from kernels.cpu.moved_attention import AttentionOwner
from kernels.kv_copy import gather_pages, scatter_pages


class RemotePages(Protocol):
    """Pages in the memory of a helper on another host, and how they are copied. Calls block.

    Layers are counted from the first layer whose pages the helper has. All calls raise TransferError if the
    helper is lost.
    """

    @property
    def pages_at_a_time(self) -> int:
        """The most pages, each with all its layers, that one message carries."""

    def new_blocks(self, num_layers: int, num_pages: int) -> torch.Tensor:
        """Return new memory for blocks, `[num_layers, num_pages, num_heads, 2, page_size, head_dim]`."""

    def read_layer(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Return copies of `pages` (int64 `[n]`) of a layer: `[n, num_heads, 2, page_size, head_dim]`."""

    def write_layer(self, layer: int, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy blocks `[n, num_heads, 2, page_size, head_dim]` into pages of a layer."""

    def read(self, pages: Sequence[int], into: torch.Tensor) -> None:
        """Copy pages of all layers into blocks, shaped as those of `new_blocks`."""

    def write(self, pages: Sequence[int], blocks: torch.Tensor) -> None:
        """Copy blocks into pages of all layers."""

    def close(self) -> None:
        """End calls in progress, and refuse further ones. Idempotent."""


@dataclass(frozen=True, slots=True)
class MovedHeads:
    """The last KV heads of all pages, which a helper hosts and computes with (BanaServe, section 4.1)."""

    layers: Sequence[torch.Tensor]
    """One tensor `[num_pages, num_moved, 2, page_size, head_dim]` for each layer, in memory that the helper
    maps too; without memory (meta tensors) if the helper is on another host."""
    owner: AttentionOwner
    """The owner's end of the exchange with the helper."""
    remote: RemotePages | None
    """The pages of a helper on another host; None if the helper is on this host."""


@dataclass(frozen=True, slots=True)
class HostedLayers:
    """Consecutive layers of all pages that a helper hosts and computes (BanaServe, section 4.1, figure 3)."""

    layers: range
    pages: Sequence[torch.Tensor]
    """The pages of each hosted layer, shaped like those of other layers, in memory that the helper maps
    too; without memory (meta tensors) if the helper is on another host."""
    owner: LayersOwner
    """The owner's end of the exchange with the helper."""
    remote: RemotePages | None
    """The pages of a helper on another host; None if the helper is on this host."""


@dataclass(frozen=True, slots=True)
class HostedPages:
    """Pages that a helper hosts and attends to (BanaServe, section 4.1, split by sequence).

    Their numbers follow those of this process's pages. They have the first tokens of sequences, and are full:
    no iteration writes them.
    """

    share: Fraction
    """The share of a sequence's pages that is to be at the helper."""
    layers: Sequence[torch.Tensor]
    """One tensor `[num_hosted, num_kv_heads, 2, page_size, head_dim]` for each layer, in memory that the
    helper maps too; without memory (meta tensors) if the helper is on another host."""
    owner: AttentionOwner
    """The owner's end of the exchange with the helper."""
    remote: RemotePages | None
    """The pages of a helper on another host; None if the helper is on this host."""

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self.layers[0])


Helped = MovedHeads | HostedLayers | HostedPages
"""The part of model and KVCache that a helper has."""


class PagesOfLayer(NamedTuple):
    """Pages of consecutive heads of one layer, in a tensor or at a helper on another host.

    If `tensor` has no memory (meta), the pages are in the layer `position` of `remote`."""

    tensor: torch.Tensor
    remote: RemotePages | None
    position: int

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """Return copies of pages, `[n, num_heads, 2, page_size, head_dim]`."""
        if self.tensor.is_meta:
            assert self.remote is not None
            return self.remote.read_layer(self.position, pages)
        return gather_pages(self.tensor, pages)

    def write(self, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy blocks, shaped as in `read`, into pages."""
        if self.tensor.is_meta:
            assert self.remote is not None
            self.remote.write_layer(self.position, pages, blocks)
        else:
            scatter_pages(self.tensor, pages, blocks)
