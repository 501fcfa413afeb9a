"""The engine alone: prefill and decode tok/s of one thread, without any process around it.

    .venv/bin/python benchmarks/engine.py

SmolLM2-135M's shape with random weights, bfloat16; medians of several runs. Decode has 200 tokens of context.
"""

import statistics
import time
from collections.abc import Callable

import torch

from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec

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


def median_s(call: Callable[..., object], *arguments: object) -> float:
    """Seconds of one call, after one that warms up."""
    call(*arguments)
    times = []
    for _ in range(NUM_RUNS):
        started_s = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def main() -> None:
    """Print one table."""
    torch.set_num_threads(1)
    spec = ModelSpec.from_hf_config(SMOLLM2)
    layers = range(spec.num_layers)
    model = DecoderModel(spec, layers, torch.bfloat16)
    model.init_dummy_weights()
    kv = DeviceKVCache(spec, layers, 512, PAGE_SIZE, torch.bfloat16)

    def passes(chunks: list[Chunk], num_passes: int) -> None:
        for _ in range(num_passes):
            model.forward(Batch.build(chunks, kv), kv).argmax(-1)

    print("| | tok/s |\n|---|---|")
    for num_tokens in (512, 1024, 2048):
        pages = kv.allocate(-(-num_tokens // PAGE_SIZE))
        chunk = Chunk(list(range(1000, 1000 + num_tokens)), 0, pages)
        elapsed_s = median_s(passes, [chunk], 1)
        print(f"| prefill, {num_tokens} tokens | {num_tokens / elapsed_s:.0f} |", flush=True)
        kv.free(pages)
    for batch_size in (1, 8, 32):
        tables = [kv.allocate(-(-(CONTEXT_LEN + 1) // PAGE_SIZE)) for _ in range(batch_size)]
        chunks = [Chunk([1000], CONTEXT_LEN, pages) for pages in tables]
        elapsed_s = median_s(passes, chunks, NUM_STEPS)
        print(f"| decode, {batch_size} sequences | {NUM_STEPS * batch_size / elapsed_s:.0f} |", flush=True)
        for pages in tables:
            kv.free(pages)


if __name__ == "__main__":
    main()
