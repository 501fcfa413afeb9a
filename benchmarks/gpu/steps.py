"""The time of whole steps of a Llama-3-8B with random weights, from lists of inputs to drawn tokens.

The steps are those of a worker.

Owns: the model, the lower bound of a decode step. Does not know: kernels.
"""

import time
from collections.abc import Callable

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.layers import DTYPE, PAGE_SIZE
from benchmarks.gpu.llama import LLAMA_3_8B
from benchmarks.report import Report
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec

_STEPS = ((1, 1024), (8, 1024), (64, 1024), (64, 4096), (256, 1024))
"""The numbers of sequences and the tokens in each. They need at most 36 GB of KVCache."""
_STEP_BAR = 0.75
"""The least speed of a decode step, as a share of reading all weights and the KVCache at copy speed."""
_PROMPTS = (1024, 2048, 8192, 32768)
_PASS_TOKENS = 2048
"""The most tokens of a prefill pass, the same as in workers on GPUs."""
_PREFILL_BAR = 0.55
_NUM_RUNS = 9


def run(report: Report) -> None:
    """Measure decode steps and prompts, and add their tables to a report."""
    ceilings = Ceilings.measure(report)
    spec = LLAMA_3_8B
    model = DecoderModel(spec, range(spec.num_layers), DTYPE, "cuda")
    model.init_dummy_weights()
    num_pages = max(batch_size * (context_len // PAGE_SIZE + 1) for batch_size, context_len in _STEPS)
    kv = DeviceKVCache(spec, model.layers, num_pages, PAGE_SIZE, DTYPE, "cuda")
    ceilings.begin(
        f"Decode steps of Llama-3-8B (computed by {model.computed_by}), wall time, tokens on the host again"
    )
    for batch_size, context_len in _STEPS:
        tables = [kv.pages.allocate(context_len // PAGE_SIZE + 1) for _ in range(batch_size)]
        chunks = [Chunk([1000], context_len, pages) for pages in tables]
        num_bytes = _weight_bytes(spec) + batch_size * (context_len + 1) * _token_bytes(spec)
        time_s = _seconds(_step(model, kv, chunks))
        ceilings.bytes_row(f"{batch_size} x {context_len} tokens", num_bytes, time_s, _STEP_BAR)
        for pages in tables:
            kv.pages.free(pages)
    ceilings.begin(f"Prompts in passes of {_PASS_TOKENS} tokens, wall time")
    for num_tokens in _PROMPTS:
        pages = kv.pages.allocate(-(-num_tokens // PAGE_SIZE))
        time_s = _seconds(_prompt(model, kv, num_tokens, pages))
        name = f"{num_tokens} tokens ({num_tokens / time_s:.0f} tok/s)"
        ceilings.flops_row(name, _prefill_flops(spec, num_tokens), time_s, _PREFILL_BAR)
        kv.pages.free(pages)


def _prompt(
    model: DecoderModel, kv: DeviceKVCache, num_tokens: int, pages: list[int]
) -> Callable[[], object]:
    passes = [
        Chunk([1000] * min(_PASS_TOKENS, num_tokens - start), start, pages)
        for start in range(0, num_tokens, _PASS_TOKENS)
    ]

    def prefill() -> object:
        for chunk in passes:
            logits = model.forward(Batch.build([chunk], kv), kv)
        return logits.argmax(-1).tolist()

    return prefill


def _step(model: DecoderModel, kv: DeviceKVCache, chunks: list[Chunk]) -> Callable[[], object]:
    return lambda: model.forward(Batch.build(chunks, kv), kv).argmax(-1).tolist()


def _seconds(step: Callable[[], object]) -> float:
    """Return the median wall time of a step in seconds. The step itself must wait for the device."""
    for _ in range(3):
        step()
    times = []
    for _ in range(_NUM_RUNS):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return sorted(times)[_NUM_RUNS // 2]


def _layer_elements(spec: ModelSpec) -> int:
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return spec.hidden_size * (heads + 3 * spec.intermediate_size)


def _weight_bytes(spec: ModelSpec) -> int:
    """Return the bytes of weights that every decode step reads.

    All matrices count except the embedding, because a step reads only one row of the embedding for each
    token.
    """
    return (spec.num_layers * _layer_elements(spec) + spec.vocab_size * spec.hidden_size) * DTYPE.itemsize


def _token_bytes(spec: ModelSpec) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * DTYPE.itemsize


def _prefill_flops(spec: ModelSpec, num_tokens: int) -> int:
    """Return the FLOP of all products and of causal attention in the layers.

    The head is left out, as a pass applies it to one token only.
    """
    attention = 2 * num_tokens * (num_tokens + 1) * spec.num_heads * spec.head_dim
    return spec.num_layers * (2 * num_tokens * _layer_elements(spec) + attention)
