"""Copies of one layer of blocks between device pages and pool pages, with checksums.

One layer of a device page has the same bytes as one layer of the block, or of this stage's or rank's shard of
the block. Layers are numbered as in the model. Loads compare the copied bytes with the pool's checksums;
stores return the checksums of the stored bytes.

Owns: how bytes are copied, on the CPU and on CUDA. Does not know: which blocks are copied when, the threads
of loads and stores.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kernels.kv_copy import gather_pages, scatter_pages
from kvstore.pool.segment import Segment
from messenger.wire.checksums import Addresses, Digests, copy_scattered
from workers.engine.kvcache.device_kvcache import DeviceKVCache

Pages = np.ndarray[Any, np.dtype[np.int64]]
_MOST_COPIERS = 4
_LEAST_BYTES = 1 << 20
"""The least bytes for each thread of a copy. Fewer bytes are not worth the wake-up of another thread."""
MOST_STAGED = 16
"""The most parts of layers that wait in pinned memory to be stored."""
_STAGING_SIZES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
"""The sizes in bytes of pinned memory that is allocated at the start: size classes of torch's allocator."""


class BlockCopy(Protocol):
    """The interface of a block that is in a device page and in a pool page."""

    @property
    def device_page(self) -> int: ...
    @property
    def pool_page(self) -> int: ...

    def stored_checksum(self, layer: int) -> int | None:
        """Return the xxh3-64 of a layer in its pool page if this process keeps the checksum, else None.

        The pool's page table has the checksum once the layer is committed.
        """


Mark = torch.cuda.Event | None
"""A point in the work of a CUDA stream; None on the CPU, where calls return when their work is done."""


class StagedLayer(NamedTuple):
    """A layer of blocks in transit from a GPU to pinned memory, complete once `copied` has passed.

    `places` are the addresses of the blocks in `staged`.
    """

    staged: torch.Tensor
    places: Addresses
    copied: torch.cuda.Event

    def part(self, begin: int, end: int) -> "StagedLayer":
        """Return the part with the blocks `[begin, end)`."""
        return self._replace(places=self.places[begin:end])


class LoadedLayer(NamedTuple):
    """The result of a load. The layer is on the device when `mark` has passed.

    `damaged` are the pool pages whose bytes differ from their checksums.
    """

    mark: Mark
    damaged: list[int]


class LayerCopies(Protocol):
    """The interface of loads and stores of layers.

    One thread calls `load`, another one `store`; the device thread calls `mark` and `wait`. `stage` is the
    part of a store that does not block.
    """

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> LoadedLayer:
        """Copy one layer from the pool to device pages, which other work may use until `free` has passed.

        Returns a mark of the load's end, and the damaged pool pages.
        """

    def stage(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> StagedLayer | None:
        """Begin to store one layer once `computed` has passed.

        A GPU copies the layer to host memory while the caller goes on. A CPU needs no stage: None is
        returned.
        """

    def store(self, layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
        """Copy one layer to the pool, after `stage`. Returns the xxh3-64 of each block's layer."""

    def mark(self) -> Mark:
        """Return a mark behind all work queued on the device."""

    def wait(self, mark: Mark) -> None:
        """Let the device begin further work only after `mark`. Does not block."""


class _PoolPages:
    """The addresses and checksums of the pool's pages. Keeps the segment mapped."""

    def __init__(self, segment: Segment) -> None:
        self.layer_bytes = segment.layout.layer_bytes
        self._header, self._layers = segment.header, segment.layout.layers
        self._table = segment.page_table()
        self._bytes = np.frombuffer(segment.buffer, np.uint8)

    def addresses(self, layer: int, blocks: Sequence[BlockCopy]) -> Addresses:
        """Return the address of one layer of each block."""
        position = self._layers.index(layer)
        start = self._bytes.ctypes.data + self._header.pages_offset + position * self.layer_bytes
        return _addresses(start, self._header.page_stride, _pool_pages(blocks), self._header.num_pages)

    def damaged(self, layer: int, blocks: Sequence[BlockCopy], digests: Digests) -> list[int]:
        """Return the pool pages of blocks for which the checksum of one layer differs from `digests`."""
        pages = _pool_pages(blocks)
        expected = self._table.layer_checksums(pages, self._layers.index(layer))
        for index, block in enumerate(blocks):
            stored = block.stored_checksum(layer)
            if stored is not None:
                expected[index] = stored
        damaged: list[int] = pages[expected != digests].tolist()
        return damaged


class HostCopies:
    """Copies between a device that is the CPU and the pool's segment.

    While a helper has some of the heads, each layer of a block is put together from two memories. While a
    helper has some of the pages, blocks are in either memory. The pages of a helper on another host are
    copied over a connection; then a copy raises TransferError if the helper is lost.
    """

    def __init__(self, kv: DeviceKVCache, segment: Segment) -> None:
        self._kv = kv
        self._pool = _PoolPages(segment)

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> LoadedLayer:
        pages, sources = _device_pages(blocks), self._pool.addresses(layer, blocks)
        if self._kv.has_whole(layer):
            digests = copy_scattered(sources, self._device_addresses(layer, pages), self._pool.layer_bytes)
        else:
            whole = torch.empty((len(pages), *self._block_shape), dtype=self._kv.dtype)
            digests = copy_scattered(sources, self._addresses_in(whole), self._pool.layer_bytes)
            self._kv.scatter(layer, torch.from_numpy(pages), whole)
        return LoadedLayer(None, self._pool.damaged(layer, blocks, digests))

    def stage(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> None:
        pass

    def store(self, layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
        pages, targets = _device_pages(blocks), self._pool.addresses(layer, blocks)
        if self._kv.has_whole(layer):
            sources = self._device_addresses(layer, pages)
        else:
            whole = self._kv.gather(layer, torch.from_numpy(pages))
            sources = self._addresses_in(whole)
        checksums: list[int] = copy_scattered(sources, targets, self._pool.layer_bytes).tolist()
        return checksums

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass

    @property
    def _block_shape(self) -> tuple[int, ...]:
        return (len(self._kv.kv_heads), *self._kv.layer_shape[2:])

    def _addresses_in(self, whole: torch.Tensor) -> Addresses:
        return _addresses(whole.data_ptr(), self._pool.layer_bytes, np.arange(len(whole)), len(whole))

    def _device_addresses(self, layer: int, pages: Pages) -> Addresses:
        start = self._kv.layer(layer).data_ptr()
        return _addresses(start, self._pool.layer_bytes, pages, self._kv.pages.num_pages)


class Copiers:
    """The threads that share the copies of a layer in host memory.

    One thread copies and checks about 6 GB/s. A GPU can load faster, and can compute KVCache faster during
    prefill.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "kvcache-copy")

    def copy(self, sources: Addresses, targets: Addresses, layer_bytes: int) -> Digests:
        """Copy blocks of `layer_bytes` bytes as `copy_scattered` does. Returns the blocks' checksums.

        Each thread that takes part has at least `_LEAST_BYTES`.
        """
        num_parts = min(self._num_threads, len(sources) * layer_bytes // _LEAST_BYTES)
        if num_parts < 2:
            return copy_scattered(sources, targets, layer_bytes)
        parts = zip(np.array_split(sources, num_parts), np.array_split(targets, num_parts), strict=True)
        copying = [self._threads.submit(copy_scattered, *part, layer_bytes) for part in parts]
        return np.concatenate([part.result() for part in copying])


class CudaCopies:
    """Copies between a GPU and the pool's segment, through pinned memory, on a stream for each direction.

    A call waits for its own copies only. Events make one stream wait for another where necessary.
    """

    def __init__(self, kv: DeviceKVCache, segment: Segment) -> None:
        self._kv = kv
        self._pool = _PoolPages(segment)
        self._load_stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._store_stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._staged_pages = (np.empty(0, np.int64), torch.empty(0))
        """The latest staged pages, on host and device. A pass stages the same pages of each layer."""
        with torch.cuda.device(kv.device):
            _take_pinned_memory()
        self._copiers = Copiers(max(1, min(_MOST_COPIERS, len(os.sched_getaffinity(0)) // 4)))

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> LoadedLayer:
        assert free is not None
        with torch.cuda.stream(self._load_stream):
            staged, places = self._staging(len(blocks))
            digests = self._copiers.copy(self._pool.addresses(layer, blocks), places, self._pool.layer_bytes)
            pages = torch.from_numpy(_device_pages(blocks)).pin_memory()
            self._load_stream.wait_event(free)
            on_device = staged.to(self._kv.device, non_blocking=True)
            index = pages.to(self._kv.device, non_blocking=True)
            scatter_pages(self._kv.layer(layer), index, on_device)
            mark = self._load_stream.record_event()
        return LoadedLayer(mark, self._pool.damaged(layer, blocks, digests))

    def stage(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> StagedLayer:
        assert computed is not None
        with torch.cuda.stream(self._store_stream):
            staged, places = self._staging(len(blocks))
            pages = _device_pages(blocks)
            latest, index = self._staged_pages
            if not np.array_equal(pages, latest):
                index = torch.from_numpy(pages).pin_memory().to(self._kv.device, non_blocking=True)
                self._staged_pages = (pages, index)
            self._store_stream.wait_event(computed)
            staged.copy_(gather_pages(self._kv.layer(layer), index), non_blocking=True)
            return StagedLayer(staged, places, self._store_stream.record_event())

    def store(self, layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
        assert staged is not None
        staged.copied.synchronize()  # blocks this thread only
        targets = self._pool.addresses(layer, blocks)
        checksums: list[int] = self._copiers.copy(staged.places, targets, self._pool.layer_bytes).tolist()
        return checksums

    def mark(self) -> Mark:
        mark: torch.cuda.Event = torch.cuda.current_stream(self._kv.device).record_event()
        return mark

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self._kv.device).wait_event(mark)

    def _staging(self, num_blocks: int) -> tuple[torch.Tensor, Addresses]:
        """Return pinned memory for one layer of `num_blocks` blocks: a tensor and each block's address.

        To be called with the device as the current device: otherwise another device would get a context of
        this process.
        """
        shape = (num_blocks, *self._kv.layer_shape[1:])
        staged = torch.empty(shape, dtype=self._kv.dtype, pin_memory=True)
        return staged, staged.data_ptr() + np.arange(num_blocks, dtype=np.int64) * self._pool.layer_bytes


def _take_pinned_memory() -> None:
    """Have torch's allocator keep pinned memory for parts of layers, as an allocation takes milliseconds."""
    for size_bytes in _STAGING_SIZES:
        _ = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(MOST_STAGED)]


def _device_pages(blocks: Sequence[BlockCopy]) -> Pages:
    return np.array([block.device_page for block in blocks], np.int64)


def _pool_pages(blocks: Sequence[BlockCopy]) -> Pages:
    return np.array([block.pool_page for block in blocks], np.int64)


def _addresses(start: int, stride: int, pages: Pages, num_pages: int) -> Addresses:
    """Return the addresses of `pages`, which are `stride` bytes apart with page 0 at `start`."""
    assert ((pages >= 0) & (pages < num_pages)).all(), "copies know no other bounds"
    return start + pages * stride


def copies_for(kv: DeviceKVCache, segment: Segment) -> LayerCopies:
    """Return the implementation of copies for the device of `kv`."""
    return CudaCopies(kv, segment) if kv.device.type == "cuda" else HostCopies(kv, segment)
