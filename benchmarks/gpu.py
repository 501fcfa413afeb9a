"""The engine on a GPU: is it right (against the CPU), and how fast is it.

    PYTHONPATH=. python benchmarks/gpu.py

Needs torch and numpy only. Without a GPU it says so and exits with 0; exits with 1 if a result differs.
"""

import sys
import time
from collections.abc import Callable

import torch

from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec, RopeKind, RopeScaling

_PAGE_SIZE = 16
_PROMPT_LENS = (70, 3, 33, 150)
_NUM_NEW = 12
_CHUNK_SIZE = 40


def _tiny(architecture: str, **differences: object) -> ModelSpec:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position": 512,
    }
    return ModelSpec(architecture, **{**sizes, **differences})  # type: ignore[arg-type]


_TINY_MODELS = {
    "llama, plain": _tiny("LlamaForCausalLM", num_kv_heads=4, tie_word_embeddings=True),
    "llama, llama3 rope": _tiny(
        "LlamaForCausalLM", rope_scaling=RopeScaling(RopeKind.LLAMA3, 8.0, 1.0, 4.0, 64)
    ),
    "mistral, window 24": _tiny("MistralForCausalLM", sliding_window=24),
    "qwen2, window from layer 1": _tiny(
        "Qwen2ForCausalLM", qkv_bias=True, sliding_window=50, num_full_attention_layers=1
    ),
    "qwen3": _tiny("Qwen3ForCausalLM", qk_norm=True, head_dim=64),
}

# The shape of Llama-3.2-1B.
_TIMED_MODEL = ModelSpec(
    "LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_position=131_072,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
)


def greedy(spec: ModelSpec, device: str) -> tuple[list[list[int]], torch.Tensor]:
    """(tokens of every sequence, logits of the last step [S, vocab_size] on the CPU), in float32.

    Prompts are prefilled in chunks, in one batch with the decode steps of the shorter ones.
    """
    model = DecoderModel(spec, range(spec.num_layers), torch.float32, device)
    model.init_dummy_weights(seed=1)
    kv = DeviceKVCache(spec, model.layers, 40, _PAGE_SIZE, torch.float32, device)
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(spec.vocab_size, (n,), generator=generator).tolist() for n in _PROMPT_LENS]
    tables = [kv.allocate(-(-(n + _NUM_NEW) // _PAGE_SIZE))[::-1] for n in _PROMPT_LENS]
    num_cached = [0] * len(texts)
    last_logits = torch.zeros(len(texts), spec.vocab_size)
    while True:
        running = [s for s, n in enumerate(_PROMPT_LENS) if len(texts[s]) < n + _NUM_NEW]
        if not running:
            return texts, last_logits
        chunks = [Chunk(texts[s][num_cached[s] :][:_CHUNK_SIZE], num_cached[s], tables[s]) for s in running]
        logits = model.forward(Batch.build(chunks, kv), kv).cpu()
        for row, (s, chunk) in enumerate(zip(running, chunks, strict=True)):
            num_cached[s] += len(chunk.token_ids)
            if num_cached[s] == len(texts[s]):
                texts[s].append(int(logits[row].argmax()))
                last_logits[s] = logits[row]


def check(device: str) -> bool:
    """Compares `device` with the CPU for every tiny model; prints a line each."""
    is_right = True
    for name, spec in _TINY_MODELS.items():
        (expected, expected_logits), (tokens, logits) = greedy(spec, "cpu"), greedy(spec, device)
        error = ((logits - expected_logits).abs().max() / expected_logits.abs().max()).item()
        is_equal = tokens == expected and error < 1e-4
        is_right &= is_equal
        print(f"{name:28} {'equal' if is_equal else 'DIFFERS'}   relative error of logits {error:.1e}")
    return is_right


def median_s(step: Callable[[], object], synchronize: Callable[[], None], num_runs: int = 9) -> float:
    """Median wall time of `step`, in seconds, after one run to warm up."""
    times = []
    for _ in range(num_runs + 1):
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[num_runs // 2]


def measure(spec: ModelSpec, device: str, synchronize: Callable[[], None]) -> None:
    """Prints prefill and decode tokens per second with dummy weights in bfloat16."""
    model = DecoderModel(spec, range(spec.num_layers), torch.bfloat16, device)
    model.init_dummy_weights()
    kv = DeviceKVCache(spec, model.layers, 4096, _PAGE_SIZE, torch.bfloat16, device)

    def step(chunks: list[Chunk]) -> float:
        return median_s(lambda: model.forward(Batch.build(chunks, kv), kv).argmax(-1), synchronize)

    for start, num_tokens in ((0, 512), (0, 4096), (12_288, 4096)):
        pages = kv.allocate((start + num_tokens) // _PAGE_SIZE)
        rate = num_tokens / step([Chunk([7] * num_tokens, start, pages)])
        print(f"prefill {num_tokens:5} tokens after {start:5}: {rate:9.0f} tok/s")
        kv.free(pages)
    for batch_size, context in ((1, 1024), (8, 1024), (32, 1024)):
        tables = [kv.allocate(context // _PAGE_SIZE) for _ in range(batch_size)]
        rate = batch_size / step([Chunk([7], context - 1, pages) for pages in tables])
        print(f"decode  batch {batch_size:2} at {context} tokens:     {rate:9.0f} tok/s")
        for pages in tables:
            kv.free(pages)


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; nothing to check or measure")
        return 0
    print(torch.cuda.get_device_name())
    if not check("cuda"):
        return 1
    measure(_TIMED_MODEL, "cuda", torch.cuda.synchronize)
    return 0


if __name__ == "__main__":
    sys.exit(main())
