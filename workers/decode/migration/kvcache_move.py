"""The move of modules to a helper or back: the KVCache is copied into memory with another arrangement.

An arrangement says which heads and layers are in which memory, here or at the helper. Pages are copied while
they are in use: first the pages that do not change any more, then the others between two passes. Afterwards
the cache has its pages in the new arrangement, under the same numbers.

Owns: the memory of the new arrangement, until the cache has it. Does not know: which pages change, who the
helper is.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.cpu.library import Library
from kernels.cpu.memory import HUGE_PAGE_BYTES, populate
from kernels.cpu.page_copy import PageCopies
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.helped_parts import Helped, HostedLayers, HostedPages, MovedHeads
from workers.errors import ModulesStayError

_GROWTH_SHARE = 0.1
"""The share of all pages that is expected to come into use during the move."""
COPIED_BYTES = 64 << 20
"""The bytes that are copied in one call. A move cannot be given up in the middle of a call."""


class KVCacheMove:
    """A move of the cache `kv` to an arrangement with `num_pages` pages.

    `helped` is the part of the new arrangement that a helper has; None if no helper has any part.
    """

    def __init__(self, library: Library, kv: DeviceKVCache, num_pages: int, helped: Helped | None) -> None:
        """Reserve the memory of the new pages. Raises OSError if there is not enough memory."""
        self._kv, self._helped = kv, helped
        moved = helped if isinstance(helped, MovedHeads) else None
        num_moved = 0 if moved is None else moved.layers[0].shape[1]
        before_layers = [kv.layer(layer) for layer in kv.layers]
        self.are_further = are_further = isinstance(helped, HostedPages) or kv.hosted_pages is not None
        """Whether the helper has pages of sequences (`HostedPages`), in addition to all pages of the owner.

        No page is copied then, because the helper's pages are empty when they come and when they go.
        """
        self._own = [] if are_further else kv.new_layers(num_pages, len(kv.kv_heads) - num_moved)
        self._layers = before_layers if are_further else list(self._own)
        if isinstance(helped, HostedLayers):
            for layer, pages in zip(helped.layers, helped.pages, strict=True):
                self._layers[layer - kv.layers.start] = pages
            first = helped.layers.start - kv.layers.start
            del self._own[first : first + len(helped.layers)]
        before = _Heads(before_layers, None if are_further else kv.helped, kv.layers.start)
        after = _Heads(self._layers, None if are_further else helped, kv.layers.start)
        assert before.remote is None or after.remote is None, "modules go from one helper to no other"
        self._before, self._after = before.remote, after.remote
        self._staged = after.staged if before.staged is None else before.staged
        """Memory of this host for the few pages that are copied at a time to or from another host.

        None if no helper on another host takes part in the move.
        """
        pairs = [] if are_further else list(zip(before.pages, after.pages, strict=True))
        parts = [(source.tensor, target.tensor) for source, target in pairs]
        here = [not (source.is_staged or target.is_staged) for source, target in pairs]
        self._copies = PageCopies(library, itertools.compress(parts, here))
        self._staging = PageCopies(library, itertools.compress(parts, (not one for one in here)))
        remote = self._after if self._before is None else self._before
        self._pages_at_a_time = (
            max(1, COPIED_BYTES // max(1, self._copies.page_bytes))
            if remote is None
            else remote.pages_at_a_time
        )
        self.copied_bytes = 0
        self._is_given_up = False

    def give_up(self) -> None:
        """Make `take_memory` and `copy` end soon. They raise ModulesStayError."""
        self._is_given_up = True

    @property
    def expected_bytes(self) -> int:
        """Bytes of this instance's own memory that the move is expected to take."""
        staged_bytes = 0 if self._staged is None else self._staged.nbytes
        return sum(end - start for start, end in self._expected_spans()) * len(self._own) + staged_bytes

    def take_memory(self) -> None:
        """Have the operating system allocate the memory of pages that are expected to be in use.

        Otherwise the pause, and the first iterations behind it, would wait for the allocation. The call
        blocks. Raises ModulesStayError if the move is given up.
        """
        for start, end in self._expected_spans():
            for layer in self._own:
                self._check()
                populate(layer.view(-1).view(torch.uint8)[start:end])

    def _expected_spans(self) -> list[tuple[int, int]]:
        """Return the byte ranges of each own layer that are expected to be in use when the move is complete.

        The ranges are whole huge pages. They contain the device pages that are in use, and the device pages
        that will come into use next.
        """
        if not self._own:
            return []
        pages, num_pages = self._kv.pages, len(self._own[0])
        used = pages.used()
        next_used = itertools.chain(used, pages.next_free, range(pages.num_pages, num_pages))
        num_expected = min(num_pages, len(used) + round(_GROWTH_SHARE * num_pages))
        there = (page for page in next_used if page < num_pages)
        layer_bytes, page_bytes = self._own[0].nbytes, self._own[0][0].nbytes
        starts = set[int]()
        for page in itertools.islice(there, num_expected):
            first = page * page_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            starts.update(range(first, (page + 1) * page_bytes, HUGE_PAGE_BYTES))
        return [(start, min(start + HUGE_PAGE_BYTES, layer_bytes)) for start in sorted(starts)]

    def copy(self, pages: Sequence[int]) -> None:
        """Copy `pages` of all layers to the new memory.

        The call blocks; other threads may read the pages, but not write them. Raises TransferError if a
        helper on another host is lost, and ModulesStayError if the move is given up.
        """
        for begin in range(0, len(pages), self._pages_at_a_time):
            self._check()
            some = pages[begin : begin + self._pages_at_a_time]
            self._copies.copy(some)
            if self._staged is not None:
                self._copy_remote(some, self._staged[:, : len(some)])
            self.copied_bytes += len(some) * (self._copies.page_bytes + self._staging.page_bytes)

    def _copy_remote(self, pages: Sequence[int], staged: torch.Tensor) -> None:
        """Copy `pages` of the heads or layers that a helper on another host has or gets.

        `staged` is memory for these pages on this host.
        """
        if self._before is not None:
            self._before.read(pages, staged)
            self._staging.copy(range(len(pages)), pages)
        elif self._after is not None:
            self._staging.copy(pages, range(len(pages)))
            self._after.write(pages, staged)

    def _check(self) -> None:
        """Raise ModulesStayError if the move is given up, or if the helper that is to get modules is lost."""
        if self._is_given_up:
            raise ModulesStayError("the move was given up")
        if self._helped is not None and self._helped.owner.is_closed:
            raise ModulesStayError("the helper was lost before the move was complete")

    def complete(self) -> list[torch.Tensor]:
        """Switch the cache to the new arrangement, and end the move. Returns the old arrangement's memory.

        To be called while nothing computes, when all used pages have been copied in their present state. If
        the helper that is to get modules is lost, raises ModulesStayError, and the cache is unchanged.
        """
        self._check()
        del self._copies, self._staging  # they refer to the old memory too
        return self._kv.rearrange(self._layers, self._helped)


class _HeadPages(NamedTuple):
    """One head's pages of one layer, `[num_pages, 2, page_size, head_dim]`.

    If `is_staged`, a helper on another host has the pages. The tensor is then the memory of this host through
    which these pages are copied, some at a time.
    """

    tensor: torch.Tensor
    is_staged: bool


class _Heads:
    """All heads of all layers in one arrangement.

    Heads of a helper on another host are in staged memory of this host.
    """

    def __init__(self, layers: Sequence[torch.Tensor], helped: Helped | None, first: int) -> None:
        """List the heads of `layers`. The first of these layers has the number `first`.

        `helped` is the part that a helper has; None if no helper has any part.
        """
        self.remote = None if helped is None else helped.remote
        self.staged: torch.Tensor | None = None
        """Memory of this host for some pages of a remote helper; None without such a helper."""
        self.pages: list[_HeadPages] = []
        hosted = helped.layers if isinstance(helped, HostedLayers) else range(first, first + len(layers))
        if self.remote is not None:
            self.staged = self.remote.new_blocks(len(hosted), self.remote.pages_at_a_time)
        for layer, pages in enumerate(layers, first):
            is_hosted = isinstance(helped, HostedLayers) and layer in hosted
            self._add(pages, layer - hosted.start if is_hosted else None)
            if isinstance(helped, MovedHeads):
                self._add(helped.layers[layer - first], layer - first)

    def _add(self, pages: torch.Tensor, position: int | None) -> None:
        """Add the heads of one layer's pages.

        `position` is the layer's place among those at the helper; None if the helper has none of these heads.
        """
        if self.staged is not None and position is not None:
            self.pages += (_HeadPages(head, True) for head in self.staged[position].unbind(1))
        else:
            self.pages += (_HeadPages(head, False) for head in pages.unbind(1))
