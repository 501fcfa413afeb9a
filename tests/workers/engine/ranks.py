"""Tensor-parallel ranks as threads of one process, and a run of a model: whole, in stages, or in ranks."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from tests.deadline import DEADLINE_S
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.tensor_parallel import TensorShard

T = TypeVar("T")

PAGE_SIZE = 8


class ThreadGroup:
    """A tensor-parallel group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self.shards = [
            TensorShard(rank, size, partial(self._all_reduce, rank), partial(self._all_gather, rank))
            for rank in range(size)
        ]

    def _all_gather(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        assert part.is_contiguous()
        self._parts[rank] = part
        self._barrier.wait()
        gathered = torch.stack(self._parts)
        self._barrier.wait()  # only then may a rank change or replace its part
        return gathered

    def _all_reduce(self, rank: int, tensor: torch.Tensor) -> None:
        tensor.copy_(sum(part.float() for part in self._all_gather(rank, tensor)))


def on_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """Call `work(rank)` for each rank in a thread, and return all results."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one rank."""

    tokens: list[list[int]]
    """The new tokens of each sequence."""
    logits: list[torch.Tensor]
    """The logits from which the tokens of each sequence were drawn, `[num_new, vocab_size]`."""
    kv: list[torch.Tensor]
    """The pages of all sequences in order, for each layer, with this rank's heads."""


def generate(
    stages: Sequence[DecoderModel], prompts: Sequence[Sequence[int]], num_new: int, chunk_size: int
) -> Outcome:
    """Decode all prompts greedily in one running batch, through the stages of one rank."""
    spec = stages[0].spec
    kvs = [
        DeviceKVCache(spec, stage.layers, 64, PAGE_SIZE, stage.dtype, stage.device, kv_heads=stage.kv_heads)
        for stage in stages
    ]
    texts = [list(prompt) for prompt in prompts]
    wanted = [len(prompt) + num_new for prompt in prompts]
    tables = [kvs[0].pages.allocate(-(-length // PAGE_SIZE))[::-1] for length in wanted]
    num_cached = [0] * len(texts)
    drawn_from: list[list[torch.Tensor]] = [[] for _ in texts]
    while running := [i for i, text in enumerate(texts) if len(text) < wanted[i]]:
        chunks = [Chunk(texts[i][num_cached[i] :][:chunk_size], num_cached[i], tables[i]) for i in running]
        batch = Batch.build(chunks, kvs[0])
        hidden = stages[0].embed(batch)
        for stage, kv in zip(stages, kvs, strict=True):
            batch = Batch.build(chunks, kv)
            for layer in stage.layers:
                hidden = stage.forward_layer(layer, hidden, batch, kv)
        logits = stages[-1].logits(hidden[batch.last_rows])
        for i, chunk, row in zip(running, chunks, logits, strict=True):
            num_cached[i] += len(chunk.token_ids)
            if num_cached[i] == len(texts[i]):
                texts[i].append(int(row.argmax()))
                drawn_from[i].append(row)
    pages = [page for table in tables for page in table]
    logits_of_texts = [torch.stack(rows) for rows in drawn_from]
    return Outcome(texts, logits_of_texts, [kv.layer(layer)[pages] for kv in kvs for layer in kv.layers])
