"""The engine alone on one thread: prefill and decode tokens a second, with the CPU's kernels and with torch.

    .venv/bin/python -m benchmarks.engine [--quick]

The model has SmolLM2-135M's shape and random weights in bfloat16. Decode has 200 tokens of context. Kernels
and torch take turns in one process, so that other load on the machine slows both. A row has the best CPU time
of the thread in several runs, and the best wall time: the difference is the work of other processes.
`--quick` leaves torch out.
"""

import argparse
import time
from collections.abc import Callable

import torch

from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.execution.model_spec import model_spec

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
PAGE_SIZE = 32
CONTEXT_LEN = 200
NUM_RUNS = 5
NUM_STEPS = 10


class Timer:
    """The shortest of several runs, in seconds of the thread's CPU time and in wall seconds."""

    def __init__(self) -> None:
        self.cpu_s = self.wall_s = float("inf")

    def measure(self, call: Callable[[], None]) -> None:
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        call()
        self.cpu_s = min(self.cpu_s, time.thread_time() - cpu_s)
        self.wall_s = min(self.wall_s, time.perf_counter() - wall_s)

    def rate(self, num_tokens: int) -> str:
        return f"{num_tokens / self.cpu_s:.0f} | {num_tokens / self.wall_s:.0f}"


def main() -> None:
    """Measure all sizes, and print one table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="do not measure torch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = model_spec(SMOLLM2)
    layers = range(spec.num_layers)
    models = [DecoderModel(spec, layers, torch.bfloat16)]
    if not options.quick:
        models.append(DecoderModel(spec, layers, torch.bfloat16, allow_native=False))
    for model in models:
        model.init_dummy_weights()
    kv = DeviceKVCache(spec, layers, 512, PAGE_SIZE, torch.bfloat16)

    def row(name: str, num_tokens: int, chunks: list[Chunk], num_passes: int) -> None:
        timers = [Timer() for _ in models]
        for run in range(NUM_RUNS + 1):
            for timer, model in zip(timers, models, strict=True):

                def passes(model: DecoderModel = model) -> None:
                    for _ in range(num_passes):
                        model.forward(Batch.build(chunks, kv), kv).argmax(-1)

                timer.measure(passes) if run else passes()  # the first warms up
        rates = [timer.rate(num_tokens * num_passes) for timer in timers]
        print(f"| {name} | {' | '.join(rates)} |", flush=True)

    columns = [f"{model.computed_by}, CPU time | wall time" for model in models]
    print(f"| tok/s | {' | '.join(columns)} |\n|---|{'---|---|' * len(models)}")
    for num_tokens in (512, 1024, 2048):
        pages = kv.pages.allocate(-(-num_tokens // PAGE_SIZE))
        chunk = Chunk(list(range(1000, 1000 + num_tokens)), 0, pages)
        row(f"prefill, {num_tokens} tokens", num_tokens, [chunk], 1)
        kv.pages.free(pages)
    for batch_size in (1, 8, 32):
        tables = [kv.pages.allocate(-(-(CONTEXT_LEN + 1) // PAGE_SIZE)) for _ in range(batch_size)]
        chunks = [Chunk([1000], CONTEXT_LEN, pages) for pages in tables]
        row(f"decode, {batch_size} sequences", batch_size, chunks, NUM_STEPS)
        for pages in tables:
            kv.pages.free(pages)


if __name__ == "__main__":
    main()
