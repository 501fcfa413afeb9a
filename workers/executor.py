"""The device's one place: everything that computes on it or copies to and from it, on one thread.

Owns: the model, the device's paged KVCache, the thread. Does not know: messages, requests, leases.
Functions here run on the device thread (`Executor.run`) and block it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kernels.kv_copy import gather_pages, scatter_pages
from mooncake.messages import SamplingParams
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.sampling import sample, uniform
from workers.layerwise import LayerTransfers, Part
from workers.pool_view import PoolView

T = TypeVar("T")


class CancelledOnDevice(Exception):
    """Nobody wants the result any more; nothing of the work is running any more."""


class Executor:
    """Runs a model on its device, one call after the other."""

    def __init__(self, model: DecoderModel, kv: DeviceKVCache) -> None:
        self.model = model
        self.kv = kv
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")

    @property
    def engine(self) -> str:
        """What computes, for people: `cuda:0 (triton)`, `cpu (avx512_bf16)`, `cpu (torch)`."""
        return f"{self.kv.device} ({self.model.computed_by})"

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

    def prefill(
        self, parts: Sequence[Part], transfers: LayerTransfers, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One pass of layer-wise prefill: the hidden states `[T, hidden_size]` behind this model's layers, of
        all parts' tokens, one part after the other. `hidden`: those before them, None in the first stage.

        Loads run one layer ahead, stores behind. Stores may be under way when it returns (`Part.storing`),
        loads are not. Raises `CancelledOnDevice` between two layers once all parts are dropped.
        """
        layers = self.model.layers
        loading = transfers.launch_load(layers.start, parts)
        batch = Batch.build([part.chunk for part in parts], self.kv)
        if hidden is None:
            hidden = self.model.embed(batch)
        for layer in layers:
            transfers.wait_loaded(loading)
            if all(part.is_dropped for part in parts):
                raise CancelledOnDevice
            loading = transfers.launch_load(layer + 1, parts) if layer + 1 in layers else None
            hidden = self.model.forward_layer(layer, hidden, batch, self.kv)
            transfers.launch_store(layer, parts)
        return hidden

    def load_blocks(self, device_pages: Sequence[int], pool_pages: Sequence[int], pool: PoolView) -> None:
        """Copy whole blocks from the pool to the device, layer by layer."""
        index = torch.tensor(device_pages, device=self.kv.device)
        for layer in self.model.layers:
            blocks = pool.read_layer(layer, pool_pages).to(self.kv.device)
            scatter_pages(self.kv.layer(layer), index, blocks)

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
