"""The device's one place: everything that computes on it or copies to and from it, on one thread.

Owns: the model, the device's paged KVCache, the thread. Does not know: messages, requests, leases.
Functions here run on the device thread (`Executor.run`) and block it.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from kernels.kv_copy import gather_pages, scatter_pages
from mooncake.messages import SamplingParams
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.sampling import sample, uniform
from workers.pool_view import PoolView

T = TypeVar("T")


class CancelledOnDevice(Exception):
    """The work's `stop` event was set; nothing of it is running any more."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block, in a device page and in a page of the pool."""

    device_page: int
    pool_page: int


class Executor:
    """Runs a model on its device, one call after the other."""

    def __init__(self, model: DecoderModel, kv: DeviceKVCache) -> None:
        self.model = model
        self.kv = kv
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")

    async def run(self, call: Callable[[], T], on_cancel: Callable[[], None] | None = None) -> T:
        """Make `call` on the device thread.

        A cancelled caller calls `on_cancel`, which may shorten the call, and waits until it has ended: only
        then may the pages that it uses be given back.
        """
        ended = asyncio.get_running_loop().run_in_executor(self._thread, call)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if on_cancel is not None:
                on_cancel()
            while not ended.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            ended.exception()  # retrieved: nobody else will
            raise

    def prefill_chunk(
        self,
        chunk: Chunk,
        stores: Sequence[BlockCopy],
        pool: PoolView,
        on_layer_stored: Callable[[int, list[int], list[int]], None],
        stop: threading.Event,
    ) -> torch.Tensor:
        """Layer-wise prefill of one chunk (Mooncake, section 5.2): float32 logits `[1, vocab]` of its end.

        After each layer its part of `stores` is copied to the pool, then `on_layer_stored(layer, pool pages,
        checksums)` is called on this thread. Raises `CancelledOnDevice` between layers once `stop` is set.
        """
        batch = Batch.build([chunk], self.kv)
        hidden = self.model.embed(batch)
        for layer in self.model.layers:
            if stop.is_set():
                raise CancelledOnDevice
            hidden = self.model.forward_layer(layer, hidden, batch, self.kv)
            if stores:
                pool_pages = self._store_layer(layer, stores, pool)
                on_layer_stored(layer, pool_pages, pool.checksums(layer, pool_pages))
        return self.model.logits(hidden[batch.last_rows])

    def _store_layer(self, layer: int, stores: Sequence[BlockCopy], pool: PoolView) -> list[int]:
        device_pages = torch.tensor([store.device_page for store in stores], device=self.kv.device)
        pool_pages = [store.pool_page for store in stores]
        pool.write_layer(layer, pool_pages, gather_pages(self.kv.layer(layer), device_pages))
        return pool_pages

    def load_blocks(self, loads: Sequence[BlockCopy], pool: PoolView) -> None:
        """Copy whole blocks from the pool to the device, layer by layer."""
        device_pages = torch.tensor([load.device_page for load in loads], device=self.kv.device)
        pool_pages = [load.pool_page for load in loads]
        for layer in self.model.layers:
            blocks = pool.read_layer(layer, pool_pages).to(self.kv.device)
            scatter_pages(self.kv.layer(layer), device_pages, blocks)

    def save_pages(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """Copies of device pages in host memory, one tensor a layer, for a preempted sequence."""
        index = torch.tensor(pages, device=self.kv.device)
        return [gather_pages(self.kv.layer(layer), index).cpu() for layer in self.model.layers]

    def restore_pages(self, pages: Sequence[int], saved: Sequence[torch.Tensor]) -> None:
        """The inverse of `save_pages`, into other pages."""
        index = torch.tensor(pages, device=self.kv.device)
        for layer, blocks in zip(self.model.layers, saved, strict=True):
            scatter_pages(self.kv.layer(layer), index, blocks.to(self.kv.device))

    def decode(self, chunks: Sequence[Chunk], sampling: Sequence[SamplingParams]) -> list[int]:
        """One iteration: the next token of every sequence. A chunk holds the sequence's last token."""
        logits = self.model.forward(Batch.build(chunks, self.kv), self.kv)
        return draw(logits, sampling, [chunk.start + len(chunk.token_ids) for chunk in chunks])


def draw(logits: torch.Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token for each row of `logits` [S, vocab]; `positions` are those of the drawn tokens."""
    uniforms = [
        uniform(params.seed, position) if params.temperature > 0 else 0.0
        for params, position in zip(sampling, positions, strict=True)
    ]
    tokens: list[int] = sample(
        logits,
        torch.tensor([params.temperature for params in sampling]),
        torch.tensor([params.top_k for params in sampling]),
        torch.tensor([params.top_p for params in sampling]),
        torch.tensor(uniforms, dtype=torch.float64),
    ).tolist()
    return tokens
