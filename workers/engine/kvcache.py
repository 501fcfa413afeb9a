"""The device's own paged KVCache: one tensor per layer, and the list of free pages.

Owns: device memory of pages and which of them are free. Does not know: the owners of pages, block keys, the
pool of host memory.
"""

import time
from collections.abc import Iterable

import torch

from kernels.cpu.memory import HUGE_PAGE_BYTES, huge_zeros, populate
from workers.engine.spec import ModelSpec


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
    (`mooncake.messages.blocks.KVLayout`).

    With a `window` there is memory for only so many layers, which take turns: layer l has the memory of layer
    `l - window`. The pages of that layer must have been stored, or given up, before those of l are written.
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
    ) -> None:
        self.spec, self.layers = spec, layers
        self.window = window if window is not None and window < len(layers) else None
        """Number of layers that have memory at a time; None: every layer has its own."""
        self.kv_heads = range(spec.num_kv_heads) if kv_heads is None else kv_heads
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype, self.device = dtype, torch.device(device)
        self.layer_shape = (num_pages, len(self.kv_heads), 2, page_size, spec.head_dim)
        tensors = range(self.window or len(layers))
        # Zeros, not garbage: attention masks the unused end of a last page, and 0 * NaN is NaN.
        if self.device.type == "cpu":
            self._tensors = [huge_zeros(self.layer_shape, dtype) for _ in tensors]
        else:
            self._tensors = [torch.zeros(self.layer_shape, dtype=dtype, device=self.device) for _ in tensors]
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    def take_memory(self) -> None:
        """Have the operating system allocate the memory of all pages on a CPU, in order. Blocking.

        Otherwise the first pass that uses a huge page waits for it in each layer. It runs at a quarter of the
        possible speed, as others compute meanwhile.
        """
        if self.device.type != "cpu":
            return
        layers = [tensor.view(-1).view(torch.uint8) for tensor in self._tensors]
        for start in range(0, len(layers[0]), HUGE_PAGE_BYTES):
            began_s = time.perf_counter()
            for layer in layers:
                populate(layer[start : start + HUGE_PAGE_BYTES])
            time.sleep(3 * (time.perf_counter() - began_s))

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def layer(self, layer: int) -> torch.Tensor:
        """The pages of `layer` (its number in the whole model): a view, not a copy."""
        assert layer in self.layers, f"layer {layer} is not in {self.layers}"
        return self._tensors[(layer - self.layers.start) % len(self._tensors)]

    def allocate(self, num_pages: int) -> list[int]:
        """Take `num_pages` pages; their content is undefined. Raises OutOfPages and takes none."""
        if num_pages > len(self._free):
            raise OutOfPages(num_pages, len(self._free), self.num_pages)
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Free pages, which can be allocated again at once."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is already free"
            self._is_free[page] = True
            self._free.append(page)
