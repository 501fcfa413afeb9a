"""The computation of a prefill alone on one core: our engine, and vLLM's build for CPUs without a server.

Owns: our side, the comparison, its table and limits. Does not know: how the peer is installed and run.
"""

import contextlib
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.kvstore.rounds import progress
from benchmarks.peers.vllm_cpu import VllmCpu
from benchmarks.prefill.bench import BLOCK_SIZE, PREFILL_CHUNK
from mooncake.model.checkpoint import open_checkpoint
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.execution.model_spec import model_spec
from workers.execution.weights import iter_weights

SIZES = (512, 1024, 2048)
MIN_RATIO = {1024: 1.2}


class Side(Protocol):
    """An engine that computes one prompt at a time."""

    def prefill_s(self, tokens: Sequence[int]) -> float:
        """Return the seconds from the prompt to its first token."""


class Engine:
    """Our engine with the default model. It computes chunk by chunk like a worker, on the calling thread."""

    def __init__(self, most_tokens: int) -> None:
        checkpoint = open_checkpoint(None)
        spec = model_spec(checkpoint.config)
        layers = range(spec.num_layers)
        self._model = DecoderModel(spec, layers, torch.bfloat16)
        self._model.load_weights(iter_weights(checkpoint, layers, lambda _done, _total: None))
        self._kv = DeviceKVCache(spec, layers, -(-most_tokens // BLOCK_SIZE), BLOCK_SIZE, torch.bfloat16)

    def prefill_s(self, tokens: Sequence[int]) -> float:
        """Return the seconds from the prompt to its first token."""
        pages = self._kv.pages.allocate(-(-len(tokens) // BLOCK_SIZE))
        started_s = time.perf_counter()
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = Chunk(tokens[start : start + PREFILL_CHUNK], start, pages)
            batch = Batch.build([chunk], self._kv)
            hidden = self._model.embed(batch)
            for layer in self._model.layers:
                hidden = self._model.forward_layer(layer, hidden, batch, self._kv)
        int(self._model.logits(hidden[batch.last_rows]).argmax(-1))
        elapsed_s = time.perf_counter() - started_s
        self._kv.pages.free(pages)
        return elapsed_s


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Bind this thread, and all threads that it starts, to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def beside_vllm(num_rounds: int, sizes: Sequence[int], home: Path) -> bool:
    """Compare both engines. Returns whether our speed is at least `MIN_RATIO` times vLLM's. Raises PeerError.

    Both compute on the same core, in turn. vLLM's process that only passes prompts on may use other cores.
    """
    core = min(os.sched_getaffinity(0))
    peer = VllmCpu(home, str(core))
    peer.install()
    progress("starting vLLM, which compiles the model")
    rng = random.Random(0)
    with contextlib.closing(peer.offline()) as theirs, on_core(core):
        sides: dict[str, Side] = {"ours": Engine(max(sizes)), "vLLM": theirs}
        print("| tokens, prefill alone | ours | vLLM | ratio |\n|---|---|---|---|", flush=True)
        is_met = True
        for num_tokens in sizes:
            times: defaultdict[str, list[float]] = defaultdict(list)
            for number in range(-1, num_rounds):  # the first warms up
                for name in sorted(sides, reverse=bool(number % 2)):
                    tokens = [rng.randrange(1000, 40000) for _ in range(num_tokens)]
                    elapsed_s = sides[name].prefill_s(tokens)
                    if number >= 0:
                        times[name].append(elapsed_s)
            our_s, their_s = statistics.median(times["ours"]), statistics.median(times["vLLM"])
            ratio, bar = their_s / our_s, MIN_RATIO.get(num_tokens)
            is_met &= bar is None or ratio >= bar
            print(
                f"| {num_tokens} | {num_tokens / our_s:.0f} tok/s | {num_tokens / their_s:.0f} tok/s "
                f"| {ratio:.2f}{'' if bar is None else f' (bar {bar})'} |",
                flush=True,
            )
    return is_met
