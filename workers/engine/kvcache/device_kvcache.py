"""The memory of the device's paged KVCache: one tensor per layer.

Owns: device memory of pages. Does not know: which of them are free (`device_pages`), the owners of pages,
block keys, the pool of host memory.
"""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.cpu.hosted_layers import LayersHelper
from kernels.cpu.memory import HUGE_PAGE_BYTES, give_back, huge_zeros, populate
from workers.engine.kvcache.device_pages import DevicePages
from workers.engine.kvcache.helped_parts import Helped, HostedLayers, HostedPages, MovedHeads, PagesOfLayer
from workers.engine.spec import ModelSpec


class DeviceKVCache:
    """Pages for the layers `[layers.start, layers.stop)` of one model, and for its `kv_heads` (default: all).

    Each layer is a tensor `[num_pages, len(kv_heads), 2, page_size, head_dim]`, K and V adjacent: a page
    is byte for byte these heads of one layer of a KVCache block of `page_size` tokens
    (`mooncake.messages.blocks.KVLayout`).

    A helper can have one of these parts:

    - `moved`: the last heads. A page here has the other heads, and there are more pages in the same memory
      (`workers.decode.migration.kvcache_move`).
    - `hosted`: some layers. Their tensors are in the helper's memory, and there are more pages in the same
      memory here.
    - `hosted_pages`: pages in addition to this process's own, with higher numbers.

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
        self.page_size = page_size
        self.pages = DevicePages(num_pages)
        self._lent: set[int] = set()
        """Numbers of the pages that are lent."""
        self._memory_lock = threading.Lock()
        """Lock that is held while memory is freed, or allocated before its use."""
        self.dtype, self.device = dtype, torch.device(device)
        self.moved: MovedHeads | None = None
        self.hosted: HostedLayers | None = None
        self.hosted_pages: HostedPages | None = None
        self._tensors = list(memory or self.new_layers(num_pages, len(self.kv_heads)))
        self._arrangement = 0
        """Number of times that the pages were moved to other memory."""

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

        With a window, only `window` layers have memory. Each tensor is [num_pages, num_heads, 2,
        page_size, head_dim] in the cache's dtype and on its device.
        """
        # Zeros, not garbage: attention masks the unused end of a last page, and 0 * NaN is NaN.
        shape = (num_pages, num_heads, 2, self.page_size, self.spec.head_dim)
        layers = range(self.window or len(self.layers))
        if self.device.type == "cpu":
            return [huge_zeros(shape, self.dtype) for _ in layers]
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in layers]

    def take_memory_beside(self) -> None:
        """Call `take_memory` on a thread of its own. A process that ends waits a moment for this thread."""
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
        TransferError if a helper on another host has the pages and is lost.
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
        """Return the pages of a layer: of all heads, or of the heads here and the moved heads separately."""
        first = 0 if self.hosted is None else self.hosted.layers.start
        remote = None if self.hosted is None else self.hosted.remote
        heads_of = [PagesOfLayer(self.layer(layer), remote, layer - first)]
        if self.moved is not None:
            position = layer - self.layers.start
            heads_of.append(PagesOfLayer(self.moved.layers[position], self.moved.remote, position))
        return heads_of

    def _halves(self, layer: int, pages: torch.Tensor) -> tuple["_Half", "_Half"]:
        """Divide pages into those of this process and those of a helper, with each side's page numbers."""
        hosted, first, position = self.hosted_pages, self.pages.first_hosted, layer - self.layers.start
        assert hosted is not None
        are_hosted = pages >= first
        own = _Half(~are_hosted, PagesOfLayer(self.layer(layer), None, position), pages[~are_hosted])
        there = PagesOfLayer(hosted.layers[position], hosted.remote, position)
        return own, _Half(are_hosted, there, pages[are_hosted] - first)

    def rearrange(self, layers: list[torch.Tensor], helped: Helped | None) -> list[torch.Tensor]:
        """Switch the pages to the memory `layers`, and return their previous memory. Page numbers stay.

        `helped` is the part that a helper has from now on; None if no helper has any. Before the call, used
        pages have been copied to `layers`, and nothing computes with them. Pages that do not exist in the new
        arrangement must be free.
        """
        hosted_pages = helped if isinstance(helped, HostedPages) else None
        if hosted_pages is None:
            self.pages.rearrange(len(layers[0]))
        else:
            self.pages.rearrange(len(layers[0]), len(hosted_pages), hosted_pages.share)
        self._arrangement += 1
        before, self._tensors = self._tensors, layers
        self.moved = helped if isinstance(helped, MovedHeads) else None
        self.hosted = helped if isinstance(helped, HostedLayers) else None
        self.hosted_pages = hosted_pages
        return before

    def reset(self) -> None:
        """Return to the arrangement with all modules in this process, in new memory.

        No page may be in use, because no page is copied.
        """
        self._tensors = []  # else both arrangements would take memory
        self.rearrange(self.new_layers(self.pages.num_own, len(self.kv_heads)), None)
        self.take_memory_beside()

    def lend(self, num_pages: int) -> list[int]:
        """Take free pages, and return their memory to the operating system. Returns the pages' numbers.

        The free pages with the highest numbers are lent, until `end_loan`. Only on a CPU. Raises OutOfPages.
        """
        pages = self.pages.lend(num_pages)
        with self._memory_lock:
            self._lent.update(pages)
            for run in _runs(pages):
                for tensor in self._tensors:
                    give_back(tensor[run.start : run.stop])
        return pages

    def end_loan(self, pages: list[int]) -> None:
        """Free pages that were lent."""
        with self._memory_lock:
            self._lent.difference_update(pages)
        self.pages.end_loan(pages)


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
