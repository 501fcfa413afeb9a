"""The profiler of a device: `python -m workers.process.profile`, started by `mooncake-serve profile`.

The profiler computes like a worker, but without other processes: prompts in passes of `worker.prefill_chunk`
tokens behind existing KVCache, and iterations of batches up to `worker.max_batch`. The profiler reports the
duration for each size of prompt and of batch that does not take too long.

Owns: the measurements. Does not know: how they are used.
"""

import asyncio
import functools
import time
from typing import NamedTuple

from mooncake.model.checkpoint import kv_layout, open_checkpoint
from mooncake.node.process import Measured, Progress, child_main, report
from mooncake.node.process_config import WorkerProcess
from workers.engine.batch import Batch, Chunk
from workers.execution.executor import Executor
from workers.execution.loading import load_executor, pick_prefill_chunk

NEW_TOKENS = (16, 64, 256, 1024, 4096, 16384)
CACHED_TOKENS = (0, 512, 2048, 8192, 32768)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT_TOKENS = (64, 512, 2048, 8192)
NUM_RUNS = 5
LONGEST_S = 2.0
"""The seconds that a run may take. If the first run of a size takes longer, larger sizes are not measured.

The size itself is then not measured a second time.
"""
TOKEN_ID = 1


class PrefillSize(NamedTuple):
    """The size of a measured prefill: new tokens behind cached ones."""

    num_new_tokens: int
    num_cached_tokens: int


class DecodeSize(NamedTuple):
    """The size of a measured iteration: `batch_size` requests with `num_context_tokens` each."""

    batch_size: int
    num_context_tokens: int


def grid(max_tokens: int, max_position: int, max_batch: int) -> list[PrefillSize | DecodeSize]:
    """Return the sizes to measure, each after smaller ones of its kind.

    Args:
        max_tokens: The tokens for which the device's KVCache has memory.
        max_position: The most tokens of a sequence of the model.
        max_batch: The most requests of a batch.
    """
    longest = min(max_tokens, max_position)
    prefills = [
        PrefillSize(num_new, num_cached)
        for num_cached in CACHED_TOKENS
        for num_new in NEW_TOKENS
        if num_new + num_cached <= longest
    ]
    decodes = [
        DecodeSize(batch_size, context)
        for context in CONTEXT_TOKENS
        for batch_size in BATCH_SIZES
        if batch_size <= max_batch and context < max_position and batch_size * (context + 1) <= max_tokens
    ]
    return [*prefills, *decodes]


class Profiler:
    """The measurements on the device thread, one size after the other."""

    def __init__(self, executor: Executor, prefill_chunk: int) -> None:
        self._model, self._kv = executor.model, executor.kv
        self._prefill_chunk = prefill_chunk
        self.too_long: list[PrefillSize | DecodeSize] = []
        """Sizes that took longer than `LONGEST_S`. Larger sizes are not measured."""

    @property
    def num_free_pages(self) -> int:
        """The number of free device pages."""
        return self._kv.pages.num_free

    def seconds(self, size: PrefillSize | DecodeSize) -> float | None:
        """Return the seconds of the shortest run of a size; None if a smaller size took too long."""
        for other in self.too_long:
            if type(size) is type(other) and size[0] >= other[0] and size[1] >= other[1]:
                return None
        passes = self._prefill(size) if isinstance(size, PrefillSize) else [self._decode(size)]
        try:
            first_s = self._run(passes)
            if first_s > LONGEST_S:
                self.too_long.append(size)
                return first_s
            return min(self._run(passes) for _ in range(NUM_RUNS))
        finally:
            self._kv.pages.free({page for chunks in passes for chunk in chunks for page in chunk.pages})

    def _prefill(self, prefill: PrefillSize) -> list[list[Chunk]]:
        start, end = prefill.num_cached_tokens, sum(prefill)
        pages = self._kv.pages.allocate(-(-end // self._kv.page_size))
        begins = range(start, end, self._prefill_chunk)
        return [
            [Chunk([TOKEN_ID] * (min(begin + self._prefill_chunk, end) - begin), begin, pages)]
            for begin in begins
        ]

    def _decode(self, size: DecodeSize) -> list[Chunk]:
        context = size.num_context_tokens
        num_pages = -(-(context + 1) // self._kv.page_size)
        return [
            Chunk([TOKEN_ID], context, self._kv.pages.allocate(num_pages)) for _ in range(size.batch_size)
        ]

    def _run(self, passes: list[list[Chunk]]) -> float:
        began_s = time.perf_counter()
        for chunks in passes:
            logits = self._model.forward(Batch.build(chunks, self._kv), self._kv)
            logits.argmax(-1).tolist()  # waits for the device
        return time.perf_counter() - began_s


async def serve(process: WorkerProcess) -> None:
    """Load the model, measure each size of `grid` that is not too slow, and report each duration at once."""
    config = process.config
    checkpoint = await asyncio.to_thread(open_checkpoint, config.model, config.load_format)
    dtype = checkpoint.dtype_of(config.dtype)
    layout = kv_layout(checkpoint, config.kvcache.block_size, dtype)
    executor = await asyncio.to_thread(load_executor, checkpoint, layout, process)
    kv = executor.kv
    profiler = Profiler(executor, pick_prefill_chunk(config.worker.prefill_chunk, kv.device))
    # A sequence does not share its last page, so each sequence may waste one page.
    num_tokens = (kv.pages.num_pages - config.worker.max_batch) * kv.page_size
    sizes = grid(num_tokens, kv.spec.max_position, config.worker.max_batch)
    for number, size in enumerate(sizes):
        report(Progress("measuring", number, len(sizes)))
        seconds = await executor.run(functools.partial(profiler.seconds, size))
        if seconds is not None:
            report(_measured(size, seconds, executor))


def _measured(size: PrefillSize | DecodeSize, seconds: float, executor: Executor) -> Measured:
    engine, device = executor.engine, executor.device_name
    match size:
        case PrefillSize(num_new_tokens, num_cached_tokens):
            return Measured("prefill", num_new_tokens, num_cached_tokens, seconds, engine, device)
        case DecodeSize(batch_size, context):
            return Measured("decode", batch_size, batch_size * (context + 1), seconds, engine, device)


if __name__ == "__main__":
    child_main(WorkerProcess, serve)
