"""The move of modules to a helper or back: pages are copied to the memory of the next arrangement while they
are in use.

Pages that do not change any more are copied beforehand. The others are copied between two passes, and then
the cache has its pages in the new arrangement, under the same numbers.

Owns: the memory of the next arrangement until then. Does not know: which pages change, who the helper is.
"""

from collections.abc import Sequence

import torch

from workers.engine.kvcache import DeviceKVCache, HostedLayers, MovedHeads

_PAGES_AT_ONCE = 64


class KVCacheMove:
    """A move of `kv` to `num_pages` pages, of which a helper has `helped` (None: nothing)."""

    def __init__(self, kv: DeviceKVCache, num_pages: int, helped: MovedHeads | HostedLayers | None) -> None:
        """Allocate the memory of the new pages. Raises OSError without memory."""
        self._kv, self._helped = kv, helped
        self._moved = helped if isinstance(helped, MovedHeads) else None
        num_moved = 0 if self._moved is None else self._moved.layers[0].shape[1]
        self._num_kept = len(kv.kv_heads) - num_moved
        self._layers = kv.new_layers(num_pages, self._num_kept)
        num_own_layers = len(self._layers)
        if isinstance(helped, HostedLayers):
            num_own_layers -= len(helped.layers)
            for layer, pages in zip(helped.layers, helped.pages, strict=True):
                self._layers[layer - kv.layers.start] = pages
        self.page_bytes = num_own_layers * self._layers[0][0].nbytes
        """Bytes of this instance's own memory that a page takes."""
        self.copied_bytes = 0

    def copy(self, pages: Sequence[int]) -> None:
        """Copy `pages` of all layers to the new memory.

        Blocking; other threads may read the pages, but not write them.
        """
        for start in range(0, len(pages), _PAGES_AT_ONCE):
            index = torch.tensor(pages[start : start + _PAGES_AT_ONCE], dtype=torch.int64)
            for position, layer in enumerate(self._kv.layers):
                blocks = self._kv.gather(layer, index)
                self.copied_bytes += blocks.nbytes
                self._layers[position].index_copy_(0, index, blocks[:, : self._num_kept])
                if self._moved is not None:
                    self._moved.layers[position].index_copy_(0, index, blocks[:, self._num_kept :])

    def complete(self) -> list[torch.Tensor]:
        """Switch the cache to the new arrangement. Returns the memory of the old one.

        Nothing computes now, and all used pages have been copied as they are.
        """
        return self._kv.rearrange(self._layers, self._helped)
