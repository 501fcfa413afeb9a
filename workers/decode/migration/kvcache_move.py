"""The move of modules to a helper or back: pages are copied to the memory of the next arrangement while they
are in use.

Pages that do not change any more are copied beforehand. The others are copied between two passes, and then
the cache has its pages in the new arrangement, under the same numbers.

Owns: the memory of the next arrangement until then. Does not know: which pages change, who the helper is.
"""

import itertools
from collections.abc import Sequence

import torch

from kernels.cpu.library import Library
from kernels.cpu.page_copy import PageCopies, take_memory
from workers.engine.kvcache import DeviceKVCache, HostedLayers, MovedHeads

_GROWTH_SHARE = 0.1
"""Share of the pages that is expected to come into use while the others are copied."""


class KVCacheMove:
    """A move of `kv` to `num_pages` pages, of which a helper has `helped` (None: nothing)."""

    def __init__(
        self, library: Library, kv: DeviceKVCache, num_pages: int, helped: MovedHeads | HostedLayers | None
    ) -> None:
        """Reserve the memory of the new pages. Raises OSError without memory."""
        self._library, self._kv, self._helped = library, kv, helped
        moved = helped if isinstance(helped, MovedHeads) else None
        num_moved = 0 if moved is None else moved.layers[0].shape[1]
        self._own = kv.new_layers(num_pages, len(kv.kv_heads) - num_moved)
        self._layers = list(self._own)
        if isinstance(helped, HostedLayers):
            for layer, pages in zip(helped.layers, helped.pages, strict=True):
                self._layers[layer - kv.layers.start] = pages
            first = helped.layers.start - kv.layers.start
            del self._own[first : first + len(helped.layers)]
        before = [_by_head(kv.layer(layer), kv.moved, layer - kv.layers.start) for layer in kv.layers]
        after = [_by_head(pages, moved, position) for position, pages in enumerate(self._layers)]
        heads = zip(itertools.chain(*before), itertools.chain(*after), strict=True)
        self._copies = PageCopies(library, heads)
        self.num_expected_pages = min(num_pages, len(kv.used_pages()) + round(_GROWTH_SHARE * num_pages))
        """Pages that are expected to be in use when the move is complete."""
        self.expected_bytes = self.num_expected_pages * len(self._own) * self._own[0][0].nbytes
        """Bytes of this instance's own memory that these pages take."""
        self.copied_bytes = 0

    def take_memory(self) -> None:
        """Have the operating system allocate the memory of as many pages as are expected to be in use, from
        page 0 on. Blocking.

        Otherwise the pause, and the first iterations behind it, would wait for that.
        """
        take_memory(self._library, self._own, self.num_expected_pages)

    def copy(self, pages: Sequence[int]) -> None:
        """Copy `pages` of all layers to the new memory.

        Blocking; other threads may read the pages, but not write them.
        """
        self._copies.copy(pages)
        self.copied_bytes += len(pages) * self._copies.page_bytes

    def complete(self) -> list[torch.Tensor]:
        """Switch the cache to the new arrangement, and end the move. Returns the memory of the old one.

        Nothing computes now, and all used pages have been copied as they are.
        """
        del self._copies  # which has the old memory too
        return self._kv.rearrange(self._layers, self._helped)


def _by_head(pages: torch.Tensor, moved: MovedHeads | None, position: int) -> list[torch.Tensor]:
    """Return a layer's pages head by head, each `[num_pages, 2, page_size, head_dim]`, moved ones too."""
    heads = list(pages.unbind(1))
    return heads if moved is None else heads + list(moved.layers[position].unbind(1))
