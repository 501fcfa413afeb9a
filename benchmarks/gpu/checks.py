"""Whether the device computes what it should: every kernel against its reference, whole models against torch.

Owns: the cases and their tolerances. Does not know: speed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kernels.cuda import kv_quantise, page_copy, rms_norm, silu_mul
from kernels.cuda.decode_attention import decode_attention
from kernels.cuda.kv_write import TokenSlots, rotate_and_write, rotate_and_write_reference
from kernels.cuda.prefill_attention import default_tile, prefill_attention
from kernels.cuda.spans import Spans, attention_reference, plan_spans
from kernels.head_norms import HeadNorms
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec, RopeKind, RopeScaling
from workers.engine.tensor_parallel import part_of
from workers.engine.warm_up import warm_up
from workers.engine.weights import Weights

_NUM_KV_HEADS = 2
# (new tokens, tokens in all)
_SEQUENCES = ((1, 1), (300, 300), (1, 64), (17, 1000), (1, 65), (130, 4000), (1, 5000))
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_PROMPT_LENS = (70, 3, 33, 150)
_NUM_NEW, _CHUNK_SIZE, _PAGE_SIZE = 12, 40, 16


def check() -> bool:
    """Prints a line for each case; True if all are right."""
    is_right = True
    for name, error, bound in (*_kernel_errors(), *_model_errors()):
        is_good = error <= bound
        is_right &= is_good
        print(f"{'ok  ' if is_good else 'WRONG'} {name}: error {error:.1e}, at most {bound:.0e}", flush=True)
    return is_right


def _kernel_errors() -> Iterator[tuple[str, float, float]]:
    """(case, largest error, bound)."""
    for dtype, bound in _TOLERANCE.items():
        for group, head_dim, page_size, window in (
            (4, 128, 64, None), (7, 64, 16, None), (1, 96, 16, None), (4, 128, 16, 100), (2, 256, 32, None)
        ):  # fmt: skip
            case = f"{dtype}, group {group}, head_dim {head_dim}, pages of {page_size}, window {window}"
            yield f"attention, {case}", _attention_error(dtype, group, head_dim, page_size, window), bound
        yield f"rotation and page write, {dtype}", _write_error(dtype), bound
        yield from _elementwise_errors(dtype, bound)
        for encoding in kv_quantise.Encoding:
            yield f"{encoding.name}, {dtype}", _quantise_error(dtype, encoding), 1.01
        yield f"gather and scatter, {dtype}", _copy_error(dtype), 0.0


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def _attention_error(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int, window: int | None
) -> float:
    used = [-(-kv_len // page_size) for _, kv_len in _SEQUENCES]
    shuffled = np.random.default_rng(0).permutation(sum(used))
    tables = np.split(shuffled, np.cumsum(used)[:-1])
    query_lens, kv_lens = zip(*_SEQUENCES, strict=True)
    tile_tokens = default_tile(dtype, head_dim).num_tokens(group)
    plan = plan_spans(query_lens, kv_lens, tables, sum(used), page_size, tile_tokens)
    kv_layer = _random(sum(used), _NUM_KV_HEADS, 2, page_size, head_dim, dtype=dtype)
    for (_, kv_len), table in zip(_SEQUENCES, tables, strict=True):
        if kv_len % page_size:
            kv_layer[table[-1], :, :, kv_len % page_size :] = float("nan")
    pages = torch.from_numpy(plan.pages).cuda()
    decode, prefill = (Spans(torch.from_numpy(t).cuda(), pages) for t in (plan.decode, plan.prefill))
    query = _random(sum(query_lens), _NUM_KV_HEADS * group, head_dim, dtype=dtype)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2], device="cuda")
    scale = head_dim**-0.5
    decode_attention(query, kv_layer, decode, scale, 8, out, sliding_window=window, lse=lse)
    prefill_attention(query, kv_layer, prefill, scale, out, sliding_window=window, lse=lse)
    every = Spans(torch.cat((decode.table, prefill.table)), pages)
    expected, expected_lse = attention_reference(query, kv_layer, every, scale, window)
    return max(_largest(out, expected), _largest(lse, expected_lse))


def _largest(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute error; infinite where a result is not finite."""
    return float((result.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max())


def _write_error(dtype: torch.dtype) -> float:
    qkv, kv_layer = _random(33, 48, 128, dtype=dtype), _random(10, 8, 2, 16, 128, dtype=dtype)
    angles = torch.rand(33, 64, device="cuda") * 6
    places = torch.randperm(160, device="cuda")[:33]
    slots = TokenSlots(angles.cos(), angles.sin(), places // 16, places % 16)
    norms = HeadNorms(_random(128, dtype=dtype), _random(128, dtype=dtype), 1e-5)
    expected, expected_kv = qkv.clone(), kv_layer.clone()
    rotate_and_write(qkv, kv_layer, slots, norms)
    rotate_and_write_reference(expected, expected_kv, slots, norms)
    largest = float(expected_kv.abs().max())
    return max(_largest(qkv[:, :32], expected[:, :32]), _largest(kv_layer, expected_kv)) / largest


def _elementwise_errors(dtype: torch.dtype, bound: float) -> Iterator[tuple[str, float, float]]:
    x, residual, weight = (
        _random(33, 4096, dtype=dtype),
        _random(33, 4096, dtype=dtype),
        _random(4096, dtype=dtype),
    )
    total = residual + x
    normed = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    expected = rms_norm.rms_norm_reference(total, weight, 1e-5)
    scale = float(expected.abs().max())
    yield f"addition and rms norm, {dtype}", _largest(normed, expected) / scale, bound
    yield f"the sum, {dtype}", _largest(residual, total), 0.0
    gated, expected = silu_mul.silu_mul(x), silu_mul.silu_mul_reference(x)
    yield f"silu, {dtype}", _largest(gated, expected) / float(expected.abs().max()), bound


def _quantise_error(dtype: torch.dtype, encoding: kv_quantise.Encoding) -> float:
    """Return the error in steps of the encoding: ties may be rounded to either side."""
    kv_layer, pages = _random(20, 8, 2, 64, 128, dtype=dtype), torch.randperm(20, device="cuda")[:7]
    numbers, scales = kv_quantise.quantise_pages(kv_layer, pages, encoding)
    expected, expected_scales = kv_quantise.quantise_reference(kv_layer, pages, encoding)
    out, expected_out = torch.zeros_like(kv_layer), torch.zeros_like(kv_layer)
    kv_quantise.dequantise_pages(out, pages, numbers, scales)
    kv_quantise.dequantise_reference(expected_out, pages, numbers, scales)
    is_same = torch.allclose(scales, expected_scales) and torch.allclose(out, expected_out, rtol=1e-2)
    steps = (numbers.view(torch.int8).int() - expected.view(torch.int8).int()).abs().max()
    return float(steps) if is_same else float("inf")


def _copy_error(dtype: torch.dtype) -> float:
    kv_layer, pages = _random(50, 8, 2, 64, 128, dtype=dtype), torch.randperm(50, device="cuda")[:30]
    blocks, target = page_copy.gather_pages(kv_layer, pages), torch.zeros_like(kv_layer)
    page_copy.scatter_pages(target, pages, blocks)
    return max(_largest(blocks, kv_layer[pages]), _largest(target[pages], blocks))


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


def _model_errors() -> Iterator[tuple[str, float, float]]:
    """Logits against torch's on the CPU, relative to the largest; infinite if a greedy token differs."""
    for name, spec in _TINY_MODELS.items():
        tensors = dummy_tensors(spec)
        expected, expected_logits = greedy(spec, tensors, "cpu")
        for allow_native in (True, False):
            tokens, logits = greedy(spec, tensors, "cuda", allow_native=allow_native)
            error = _largest(logits, expected_logits) / float(expected_logits.abs().max())
            computer = "kernels and graphs" if allow_native else "torch"
            yield f"{name}, {computer}", error if tokens == expected else float("inf"), 1e-4


@contextmanager
def _no_waiting(*, is_forbidden: bool) -> Iterator[None]:
    """Torch raises an error when the host waits for the device within it."""
    torch.cuda.set_sync_debug_mode("error" if is_forbidden else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def dummy_tensors(spec: ModelSpec) -> list[tuple[str, torch.Tensor]]:
    """Random weights, drawn on the CPU: each kind of device draws others."""
    weights = Weights(spec, range(spec.num_layers), torch.float32, torch.device("cpu"), part_of(spec))
    return list(weights.dummy_tensors(seed=1))


def greedy(
    spec: ModelSpec, tensors: list[tuple[str, torch.Tensor]], device: str, *, allow_native: bool = False
) -> tuple[list[list[int]], torch.Tensor]:
    """(tokens of every sequence, logits of the last step [S, vocab_size] on the CPU), in float32.

    Prompts are prefilled in chunks, in one batch with the decode steps of the shorter ones.
    """
    model = DecoderModel(spec, range(spec.num_layers), torch.float32, device, allow_native=allow_native)
    model.load_weights(tensors)
    kv = DeviceKVCache(spec, model.layers, 40, _PAGE_SIZE, torch.float32, device)
    warm_up(model, kv)
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
        batch = Batch.build(chunks, kv)
        # A first decode step of its size may wait: it captures a graph.
        is_prefill = batch.num_tokens > len(chunks)
        with _no_waiting(is_forbidden=model.computed_by == "triton" and is_prefill):
            logits = model.forward(batch, kv)
        logits = logits.cpu()
        for row, (s, chunk) in enumerate(zip(running, chunks, strict=True)):
            num_cached[s] += len(chunk.token_ids)
            if num_cached[s] == len(texts[s]):
                texts[s].append(int(logits[row].argmax()))
                last_logits[s] = logits[row]
