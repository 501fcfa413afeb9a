"""The device's own paged KVCache: one tensor per layer, and the list of free pages.

Owns: device memory of pages and which of them are free. Does not know: the owners of pages, block keys, the
pool of host memory.
"""

import bisect
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kernels.cpu.hosted_layers import LayersHelper
from kernels.cpu.memory import HUGE_PAGE_BYTES, give_back, huge_zeros, populate
from workers.engine.kvcache.helped_parts import Helped, HostedLayers, HostedPages, MovedHeads, PagesOfLayer
from workers.engine.spec import ModelSpec

GROWTH_SHARE = 1 / 16
"""The pages of this process that shall stay free when a sequence gets pages, as a share of the sequence's.

If fewer would stay free, more of the sequence's pages go to a helper, so that the sequence can grow here.
"""
LONG_SHARE = 1 / 32
"""The least share of this process's pages with which a sequence counts as long.

For shorter sequences the exchange with a helper costs more than it saves.
"""


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for."""

    def __init__(self, num_wanted: int, num_free: int, num_pages: int) -> None:
        super().__init__(
            f"wanted {num_wanted} KVCache pages, {num_free} of {num_pages} are free; free some or wait"
        )
        self.num_wanted, self.num_free, self.num_pages = num_wanted, num_free, num_pages


class DeviceKVCache:
    """Pages for the layers `[layers.start, layers.stop)` of one model, and for its `kv_heads` (default: all).

    Each layer is a tensor `[num_pages, len(kv_heads), 2, page_size, head_dim]`, K and V adjacent: a page
    is byte for byte these heads of one layer of a KVCache block of `page_size` tokens
    (`mooncake.messages.blocks.KVLayout`). While a helper has the last heads (`moved`), a page here has the
    others, and there are more pages in the same memory (`workers.decode.migration.kvcache_move`). The same
    holds while a helper has layers (`hosted`): their pages are tensors like the others, in memory of the
    helper. While a helper has pages (`hosted_pages`), they follow this process's own, and have higher
    numbers.

    With a `window` there is memory for only `window` layers, which take turns: layer l has the memory of
    layer `l - window`. The pages of that layer must have been stored, or given up, before the pages of l are
    written.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        kv_heads: range | None = None,
        window: int | None = None,
        memory: Sequence[torch.Tensor] | None = None,
        owner: LayersHelper | None = None,
    ) -> None:
        """Make a cache with all pages free.

        `memory` are tensors with the pages of these layers; None allocates new ones. `owner` is the exchange
        with another instance, if the pages are for that instance's sequences.
        """
        self.spec, self.layers, self.owner = spec, layers, owner
        self.window = window if window is not None and window < len(layers) else None
        """Number of layers that have memory at a time; None: every layer has its own."""
        self.kv_heads = range(spec.num_kv_heads) if kv_heads is None else kv_heads
        self.num_pages, self.page_size = num_pages, page_size
        self.num_own_pages = num_pages
        """The number of pages while no helper has modules."""
        self.num_usable_pages = num_pages
        """Pages that are free, or are used here: neither lent nor closed."""
        self._lent: set[int] = set()
        """Numbers of the pages that are lent."""
        self._memory_lock = threading.Lock()
        """Lock that is held while memory is freed, or allocated before its use."""
        self.dtype, self.device = dtype, torch.device(device)
        self.moved: MovedHeads | None = None
        self.hosted: HostedLayers | None = None
        self.hosted_pages: HostedPages | None = None
        self._tensors = list(memory or self.new_layers(num_pages, len(self.kv_heads)))
        self._free = list(range(num_pages - 1, -1, -1))
        self._free_hosted: list[int] = []
        self._is_free = [True] * num_pages
        self._num_open = num_pages
        """The number of the first closed page. No page from this number on is allocated."""
        self._keeps_freed = False
        """Whether pages that are freed stay closed until `rearrange`."""
        self._arrangement = 0
        """Number of times that pages have got other memory."""

    @property
    def is_helped(self) -> bool:
        """Whether a helper has some of the modules."""
        return self.helped is not None

    @property
    def num_lent_pages(self) -> int:
        """The number of pages whose memory is lent."""
        return len(self._lent)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of a layer's pages in this process, without moved heads and hosted pages."""
        return tuple(self._tensors[0].shape)

    @property
    def page_bytes(self) -> int:
        """The bytes of a page of this process, all layers together."""
        return sum(tensor[0].nbytes for tensor in self._tensors)

    def new_layers(self, num_pages: int, num_heads: int) -> list[torch.Tensor]:
        """Return new tensors with zeros for `num_pages` pages: one for each layer that has memory.

        With a window, as many layers as the window have memory. Each tensor is [num_pages, num_heads, 2,
        page_size, head_dim] in the cache's dtype and on its device.
        """
        # Zeros, not garbage: attention masks the unused end of a last page, and 0 * NaN is NaN.
        shape = (num_pages, num_heads, 2, self.page_size, self.spec.head_dim)
        layers = range(self.window or len(self.layers))
        if self.device.type == "cpu":
            return [huge_zeros(shape, self.dtype) for _ in layers]
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in layers]

    def take_memory_beside(self) -> None:
        """Call `take_memory` on a thread of its own, for which the end of the process waits a moment."""
        # Not a daemon: calls of torch that end after the interpreter abort the process.
        threading.Thread(target=self.take_memory, name="kvcache-memory").start()

    def take_memory(self) -> None:
        """Have the operating system allocate the memory of all pages that are not lent; only on a CPU.

        Without this, the first pass that uses a huge page would wait for its allocation in each layer. Memory
        is taken in the order of pages, a huge page at a time and at a quarter of the possible speed, because
        other threads compute meanwhile. The call blocks. It ends early if the pages get other memory, or the
        main thread has ended.
        """
        if self.device.type != "cpu":
            return
        arrangement = self._arrangement
        layer_bytes = [tensor.nbytes for tensor in self._tensors]  # empty while the cache is reset
        for start in range(0, max(layer_bytes, default=0), HUGE_PAGE_BYTES):
            for number in range(len(self._tensors)):
                began_s = time.perf_counter()
                self._populate(number, start)
                # While this thread sleeps, it has no reference to tensors that others may free.
                time.sleep(3 * (time.perf_counter() - began_s))
                if self._arrangement != arrangement or not threading.main_thread().is_alive():
                    return

    def _populate(self, number: int, start: int) -> None:
        end = start + HUGE_PAGE_BYTES
        for layer in self._tensors[number : number + 1]:  # empty while the cache is reset
            page_bytes = layer[0].nbytes
            with self._memory_lock:
                if not layer.is_meta and self._lent.isdisjoint(
                    range(start // page_bytes, -(-end // page_bytes))
                ):
                    populate(layer.view(-1).view(torch.uint8)[start:end])

    @property
    def num_free_pages(self) -> int:
        return len(self._free) + len(self._free_hosted)

    def num_free_for(self, num_full: int, num_own_coming: int = 0, num_hosted_coming: int = 0) -> int:
        """Return how many free pages a sequence can get, once so many more pages of this process and of a
        helper are free.

        Of its pages, only the first `num_full`, which are full of tokens, can be at a helper.
        """
        num_hosted = min(num_full, len(self._free_hosted) + num_hosted_coming)
        return len(self._free) + num_own_coming + num_hosted

    def most_pages_for(self, num_full: int) -> int:
        """Return how many pages a sequence can get if no other sequence has any.

        Of its pages, only the first `num_full`, which are full of tokens, can be at a helper.
        """
        num_own = min(self.num_usable_pages, self._end_of_own)
        return num_own + min(num_full, self.num_usable_pages - num_own)

    @property
    def free_pages(self) -> list[int]:
        """The free pages, in the order in which they are allocated."""
        return self._free[::-1]

    @property
    def _end_of_own(self) -> int:
        """The number of pages of this process, which is the number of the first page that a helper has."""
        return self.num_pages if self.hosted_pages is None else self.num_pages - len(self.hosted_pages)

    def num_hosted_of(self, pages: Sequence[int]) -> int:
        """Return how many of a sequence's pages a helper has: the first ones."""
        first = self._end_of_own
        return bisect.bisect_left(pages, True, key=lambda page: page < first)

    @property
    def helped(self) -> Helped | None:
        """The modules that a helper has; None for none."""
        return self.moved or self.hosted or self.hosted_pages

    def has_whole(self, layer: int) -> bool:
        """Return whether this process has mapped memory with all pages of `layer`, whole and in one piece.

        False if heads are moved, if a helper has pages, or if the layer is with a helper on another host.
        """
        return self.moved is None and self.hosted_pages is None and not self.layer(layer).is_meta

    def layer(self, layer: int) -> torch.Tensor:
        """Return the pages of `layer` (its number in the whole model): a view, not a copy."""
        assert layer in self.layers, f"layer {layer} is not in {self.layers}"
        return self._tensors[(layer - self.layers.start) % len(self._tensors)]

    def gather(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Return copies of some pages of one layer.

        `pages` are int64 `[n]`; the result is `[n, len(kv_heads), 2, page_size, head_dim]`. Raises
        TransferError if they are at a lost helper on another host.
        """
        if self.hosted_pages is not None:
            own, hosted = self._halves(layer, pages)
            blocks = torch.empty((len(pages), *self.layer_shape[1:]), dtype=self.dtype)
            for half in (own, hosted):
                if half.places.any():
                    blocks[half.places] = half.of_layer.read(half.pages)
            return blocks
        parts = [heads.read(pages) for heads in self._heads_of(layer)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scatter(self, layer: int, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy one layer of blocks `[n, len(kv_heads), 2, page_size, head_dim]` into pages, int64 `[n]`.

        Raises TransferError as `gather`.
        """
        if self.hosted_pages is not None:
            for half in self._halves(layer, pages):
                if half.places.any():
                    half.of_layer.write(half.pages, blocks[half.places])
            return
        first = 0
        for heads in self._heads_of(layer):
            end = first + heads.tensor.shape[1]
            heads.write(pages, blocks[:, first:end])
            first = end

    def _heads_of(self, layer: int) -> list[PagesOfLayer]:
        """Return the pages of a layer: all heads together, or those here and those that are moved."""
        first = 0 if self.hosted is None else self.hosted.layers.start
        remote = None if self.hosted is None else self.hosted.remote
        heads_of = [PagesOfLayer(self.layer(layer), remote, layer - first)]
        if self.moved is not None:
            position = layer - self.layers.start
            heads_of.append(PagesOfLayer(self.moved.layers[position], self.moved.remote, position))
        return heads_of

    def _halves(self, layer: int, pages: torch.Tensor) -> tuple["_Half", "_Half"]:
        """Divide pages into those of this process and those of a helper, with each side's page numbers."""
        hosted, first, position = self.hosted_pages, self._end_of_own, layer - self.layers.start
        assert hosted is not None
        are_hosted = pages >= first
        own = _Half(~are_hosted, PagesOfLayer(self.layer(layer), None, position), pages[~are_hosted])
        there = PagesOfLayer(hosted.layers[position], hosted.remote, position)
        return own, _Half(are_hosted, there, pages[are_hosted] - first)

    def rearrange(self, layers: list[torch.Tensor], helped: Helped | None) -> list[torch.Tensor]:
        """Switch the pages to the memory `layers`, and return their memory of before. Page numbers stay.

        `helped` is the part that a helper has from now on; None if no helper has any. Before the call, used
        pages have been copied to `layers`, and nothing computes with them. Pages that do not exist in the new
        arrangement must be free.
        """
        hosted_pages = helped if isinstance(helped, HostedPages) else None
        num_pages = len(layers[0]) + (0 if hosted_pages is None else len(hosted_pages))
        assert all(self._is_free[num_pages:])
        self._is_free = (self._is_free + [True] * num_pages)[:num_pages]
        self.num_pages = num_pages
        self._arrangement += 1
        self._keeps_freed = False
        before, self._tensors = self._tensors, layers
        self.moved = helped if isinstance(helped, MovedHeads) else None
        self.hosted = helped if isinstance(helped, HostedLayers) else None
        self.hosted_pages = hosted_pages
        self.reopen()
        return before

    def reset(self) -> None:
        """Return to an arrangement with all modules in this process, all pages free, nothing copied."""
        self._tensors = []  # else both arrangements would take memory
        self.rearrange(self.new_layers(self.num_own_pages, len(self.kv_heads)), None)
        self.take_memory_beside()

    def used_pages(self, first: int = 0) -> list[int]:
        """Return the numbers of pages from `first` on that are not free."""
        return [page for page in range(first, self.num_pages) if not self._is_free[page]]

    def close_from(self, first: int) -> None:
        """Stop allocating pages from `first` on until `rearrange` or `reopen`."""
        self._num_open = self.num_usable_pages = first
        self._free = [page for page in self._free if page < first]
        self._free_hosted = [page for page in self._free_hosted if page < first]

    def keep_freed(self) -> None:
        """Keep pages that are freed from now on closed until `rearrange`.

        A lost helper may still write to them.
        """
        self._keeps_freed = True

    def reopen(self) -> None:
        """Allow the allocation of closed pages again."""
        assert not self._keeps_freed
        self.num_usable_pages = self._num_open = self.num_pages
        free = [page for page in range(self.num_pages - 1, -1, -1) if self._is_free[page]]
        self._free = [page for page in free if page < self._end_of_own]
        self._free_hosted = [page for page in free if page >= self._end_of_own]

    def lend(self, num_pages: int) -> list[int]:
        """Take free pages, and return their memory to the operating system until `end_loan`.

        The pages are adjacent where possible. Only on a CPU. Raises OutOfPages.
        """
        if num_pages > len(self._free):
            raise OutOfPages(num_pages, len(self._free), self.num_pages)
        self._free.sort(reverse=True)
        pages, self._free = self._free[:num_pages][::-1], self._free[num_pages:]
        for page in pages:
            self._is_free[page] = False
        self.num_usable_pages -= num_pages
        with self._memory_lock:
            self._lent.update(pages)
            for run in _runs(pages):
                for tensor in self._tensors:
                    give_back(tensor[run.start : run.stop])
        return pages

    def end_loan(self, pages: list[int]) -> None:
        """Free pages that were lent."""
        self.num_usable_pages += len(pages)
        with self._memory_lock:
            self._lent.difference_update(pages)
        self.free(pages)

    def allocate(self, num_pages: int, num_full: int = 0) -> list[int]:
        """Take `num_pages` free pages, whose content is undefined. Raises OutOfPages if there are fewer.

        A helper can have some of the first `num_full` pages, because only loads will write these.
        """
        if num_pages > self.num_free_for(num_full):
            raise OutOfPages(num_pages, self.num_free_for(num_full), self.num_pages)
        num_hosted = self.num_to_host(num_pages, num_full)
        pages = self.allocate_hosted(num_hosted)
        pages += [self._free.pop() for _ in range(num_pages - num_hosted)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def allocate_hosted(self, num_pages: int) -> list[int]:
        """Take `num_pages` free pages that a helper has. There must be as many."""
        pages = [self._free_hosted.pop() for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def num_to_host(
        self,
        num_pages: int,
        num_full: int,
        held: Sequence[int] = (),
        num_going: int = 0,
        num_kept: int = 0,
    ) -> int:
        """Return how many of a sequence's pages shall be at a helper.

        The result is the configured share (`HostedPages.share`) of the pages, and 0 for a short sequence. If
        the sequence would have little room here to grow, the result is all pages that can be at the helper.

        Args:
            num_pages: The number of the sequence's pages.
            num_full: How many of them, the first ones, are full of tokens.
            held: The pages that the sequence has already.
            num_going: The number of pages of other sequences that are about to go to the helper. So many more
                pages of this process will be free, and so many fewer of the helper's.
            num_kept: The number of free pages of this process that do not count as room for this sequence.
        """
        if self.hosted_pages is None:
            return 0
        num_there, num_wanted = self.num_hosted_of(held), 0
        most = min(num_full, len(self._free_hosted) - num_going + num_there)
        if num_pages >= LONG_SHARE * self._end_of_own:
            num_wanted = round(num_pages * self.hosted_pages.share)
        num_here = len(held) - num_there
        num_free = len(self._free) + num_going - num_kept
        num_left = num_free + num_here - (num_pages - min(num_wanted, most))
        return most if num_left < GROWTH_SHARE * num_pages else min(num_wanted, most)

    def free(self, pages: Iterable[int]) -> None:
        """Free pages, which can be allocated again at once."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is already free"
            self._is_free[page] = True
            if page < self._num_open and not self._keeps_freed:
                (self._free if page < self._end_of_own else self._free_hosted).append(page)


class _Half(NamedTuple):
    """The pages of a list that are at one side: their mask in the list, and their numbers at that side."""

    places: torch.Tensor
    of_layer: PagesOfLayer
    pages: torch.Tensor


def _runs(pages: Sequence[int]) -> list[range]:
    """Return the runs of adjacent pages in an ascending sequence."""
    runs: list[range] = []
    for page in pages:
        if runs and runs[-1].stop == page:
            runs[-1] = range(runs[-1].start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs
