"""One layer of some blocks, between the device's pages and the pool's, checked on the way.

A layer of a device page is byte for byte one layer of a block, or of the shard of it that a stage has. Layers
are the model's. Loads compare checksums with those that the pool keeps, stores return new ones.

Owns: how bytes get there, on the CPU and on CUDA. Does not know: when, which blocks, threads.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from kernels.kv_copy import gather_pages, scatter_pages
from kvstore.segment import Segment
from messenger.checksums import copy_layers
from workers.engine.kvcache import DeviceKVCache


class BlockCopy(Protocol):
    """One block, in a device page and in a page of the pool."""

    @property
    def device_page(self) -> int: ...
    @property
    def pool_page(self) -> int: ...


Mark = torch.cuda.Event | None
"""a moment in a stream's work; None where calls return when their work is done"""


class Loaded(NamedTuple):
    """The layer is on the device when `mark` has passed. `damaged` are pool pages with wrong bytes."""

    mark: Mark
    damaged: list[int]


class Copies(Protocol):
    """Loads are called by one thread, stores by one, the other two by the device thread."""

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> Loaded:
        """Copies one layer from the pool to device pages that nobody uses any more once `free` has passed."""

    def store(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> list[int]:
        """Copies one layer to the pool once `computed` has passed. Returns the xxh3-64 of each block's."""

    def mark(self) -> Mark:
        """What has been given to the device so far."""

    def wait(self, mark: Mark) -> None:
        """What the device is given from now on comes after `mark`. Does not block."""


class HostCopies:
    """Between a device that is the CPU and the pool's segment."""

    def __init__(self, kv: DeviceKVCache, segment: Segment) -> None:
        self._segment = segment
        self._table = segment.page_table()
        self._layer_bytes = segment.layout.layer_bytes
        self._first_layer = kv.layers.start
        self._device = {
            layer: memoryview(kv.layer(layer).view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            for layer in kv.layers
        }

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> Loaded:
        damaged, position = [], layer - self._first_layer
        for block in blocks:
            source = self._segment.layer_view(block.pool_page, position)
            checksum = copy_layers(source, self._device_view(layer, block), self._layer_bytes)
            if checksum != self._table.checksums(block.pool_page, range(position, position + 1)):
                damaged.append(block.pool_page)
        return Loaded(None, damaged)

    def store(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> list[int]:
        checksums = []
        for block in blocks:
            target = self._segment.layer_view(block.pool_page, layer - self._first_layer)
            checksum = copy_layers(self._device_view(layer, block), target, self._layer_bytes)
            checksums.append(int.from_bytes(checksum, "little"))
        return checksums

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass

    def _device_view(self, layer: int, block: BlockCopy) -> memoryview:
        start = block.device_page * self._layer_bytes
        return self._device[layer][start : start + self._layer_bytes]


class CudaCopies:
    """Between a GPU and the pool's segment: by way of pinned memory, on a stream for each direction.

    No call waits for more than its own copies: streams wait for each other by events.
    """

    def __init__(self, kv: DeviceKVCache, segment: Segment) -> None:
        self._kv = kv
        self._segment = segment
        self._table = segment.page_table()
        self._layer_bytes = segment.layout.layer_bytes
        self._first_layer = kv.layers.start
        self._load_stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._store_stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> Loaded:
        staged, views = self._staging(len(blocks))
        damaged, position = [], layer - self._first_layer
        for block, view in zip(blocks, views, strict=True):
            source = self._segment.layer_view(block.pool_page, position)
            checksum = copy_layers(source, view, self._layer_bytes)
            if checksum != self._table.checksums(block.pool_page, range(position, position + 1)):
                damaged.append(block.pool_page)
        pages = torch.tensor([block.device_page for block in blocks]).pin_memory()
        assert free is not None
        with torch.cuda.stream(self._load_stream):
            self._load_stream.wait_event(free)
            on_device = staged.to(self._kv.device, non_blocking=True)
            index = pages.to(self._kv.device, non_blocking=True)
            scatter_pages(self._kv.layer(layer), index, on_device)
            return Loaded(self._load_stream.record_event(), damaged)

    def store(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> list[int]:
        assert computed is not None
        staged, views = self._staging(len(blocks))
        pages = torch.tensor([block.device_page for block in blocks]).pin_memory()
        with torch.cuda.stream(self._store_stream):
            self._store_stream.wait_event(computed)
            index = pages.to(self._kv.device, non_blocking=True)
            staged.copy_(gather_pages(self._kv.layer(layer), index), non_blocking=True)
            copied = self._store_stream.record_event()
        copied.synchronize()  # this thread only
        checksums = []
        for block, view in zip(blocks, views, strict=True):
            target = self._segment.layer_view(block.pool_page, layer - self._first_layer)
            checksums.append(int.from_bytes(copy_layers(view, target, self._layer_bytes), "little"))
        return checksums

    def mark(self) -> Mark:
        mark: torch.cuda.Event = torch.cuda.current_stream(self._kv.device).record_event()
        return mark

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self._kv.device).wait_event(mark)

    def _staging(self, num_blocks: int) -> tuple[torch.Tensor, list[memoryview]]:
        """Pinned memory for one layer of so many blocks, as a tensor and as the bytes of each."""
        shape = (num_blocks, *self._kv.layer(self._kv.layers.start).shape[1:])
        staged = torch.empty(shape, dtype=self._kv.dtype, pin_memory=True)
        flat = memoryview(staged.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        size = self._layer_bytes
        return staged, [flat[start : start + size] for start in range(0, num_blocks * size, size)]


def copies_for(kv: DeviceKVCache, segment: Segment) -> Copies:
    """Those for the device of `kv`."""
    return CudaCopies(kv, segment) if kv.device.type == "cuda" else HostCopies(kv, segment)
