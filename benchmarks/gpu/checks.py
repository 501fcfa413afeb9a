"""Checks of the results on the device: every kernel against its reference, whole models against torch.

Owns: the cases and their tolerances. Does not know: speed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.gpu.processes import results_of
from benchmarks.report import Found, Report
from kernels.cuda import kv_quantise, page_copy, rms_norm, silu_mul
from kernels.cuda.decode_attention import decode_attention
from kernels.cuda.kv_write import TokenSlots, rotate_and_write, rotate_and_write_reference
from kernels.cuda.prefill_attention import default_tile, prefill_attention
from kernels.cuda.spans import Spans, attention_reference, plan_spans
from kernels.head_norms import HeadNorms
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec, RopeKind, RopeScaling
from workers.engine.tensor_parallel import part_of
from workers.engine.warm_up import warm_up
from workers.engine.weights import Weights

_NUM_PROCESSES = min(8, os.cpu_count() or 1)
"""The number of processes. Each one compiles kernels on one core, and has a context on the device."""
_NUM_KV_HEADS = 2
# (new tokens, tokens in all)
_SEQUENCES = ((1, 1), (300, 300), (1, 64), (17, 1000), (1, 65), (130, 4000), (1, 5000))
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_PROMPT_LENS = (70, 3, 33, 150)
_NUM_NEW, _CHUNK_SIZE, _PAGE_SIZE = 12, 40, 16


class Case(NamedTuple):
    """A call that returns the largest error of a result, and the largest error that is allowed."""

    name: str
    error: partial[float]
    bound: float


def run(report: Report) -> None:
    """Compare every result with its reference, and add a row for each case."""
    cases = [*_kernel_cases(), *_model_cases()]
    report.checks("Errors of results against their references")
    results = results_of([partial(_on_one_thread, case.error) for case in cases], _NUM_PROCESSES)
    for case, result in zip(cases, results, strict=True):
        report.check(case.name, partial(_found, result, case.bound))


def _found(result: float | BaseException, bound: float) -> Found:
    if isinstance(result, BaseException):
        raise result
    return Found(result <= bound, f"{result:.1e}, at most {bound:.0e}")


def _on_one_thread(error: Callable[[], float]) -> float:
    torch.set_num_threads(1)
    return error()


def _kernel_cases() -> Iterator[Case]:
    for dtype, bound in _TOLERANCE.items():
        for group, head_dim, page_size, window in (
            (4, 128, 64, None), (7, 64, 16, None), (1, 96, 16, None), (4, 128, 16, 100), (2, 256, 32, None),
            (7, 64, 64, None), (3, 128, 128, 100)
        ):  # fmt: skip
            shape = f"group {group}, head_dim {head_dim}, pages of {page_size}, window {window}"
            yield Case(
                f"attention, {dtype}, {shape}",
                partial(_attention_error, dtype, group, head_dim, page_size, window),
                bound,
            )
        yield Case(f"rotation and page write, {dtype}", partial(_write_error, dtype), bound)
        yield Case(f"addition and rms norm, {dtype}", partial(_norm_error, dtype), bound)
        yield Case(f"silu, {dtype}", partial(_silu_error, dtype), bound)
        for encoding in kv_quantise.Encoding:
            yield Case(f"{encoding.name}, {dtype}", partial(_quantise_error, dtype, encoding), 1.01)
        yield Case(f"gather and scatter, {dtype}", partial(_copy_error, dtype), 0.0)


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
    prefill_attention(query, kv_layer, prefill, scale, out, sliding_window=window)  # as layers call it
    every = Spans(torch.cat((decode.table, prefill.table)), pages)
    expected, expected_lse = attention_reference(query, kv_layer, every, scale, window)
    return max(_largest(out, expected), _largest(lse, expected_lse))


def _largest(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute error; infinite if a result is not finite."""
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


def _norm_error(dtype: torch.dtype) -> float:
    """Return the error of the norm; infinite if its sum differs from torch's sum."""
    x, residual, weight = (_random(*shape, dtype=dtype) for shape in ((33, 4096), (33, 4096), (4096,)))
    total = residual + x
    normed = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    expected = rms_norm.rms_norm_reference(total, weight, 1e-5)
    if not torch.equal(residual, total):
        return float("inf")
    return _largest(normed, expected) / float(expected.abs().max())


def _silu_error(dtype: torch.dtype) -> float:
    x = _random(33, 4096, dtype=dtype)
    gated, expected = silu_mul.silu_mul(x), silu_mul.silu_mul_reference(x)
    return _largest(gated, expected) / float(expected.abs().max())


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


def _model_cases() -> Iterator[Case]:
    for name, spec in _TINY_MODELS.items():
        for allow_native, computer in ((True, "kernels and graphs"), (False, "torch")):
            yield Case(f"{name}, {computer}", partial(_model_error, spec, allow_native), 1e-4)


def _model_error(spec: ModelSpec, allow_native: bool) -> float:
    """Return the relative error of logits against torch on the CPU; infinite if a greedy token differs."""
    tensors = dummy_tensors(spec)
    expected, expected_logits = greedy(spec, tensors, "cpu")
    tokens, logits = greedy(spec, tensors, "cuda", allow_native=allow_native)
    error = _largest(logits, expected_logits) / float(expected_logits.abs().max())
    return error if tokens == expected else float("inf")


@contextmanager
def _no_waiting(*, is_forbidden: bool) -> Iterator[None]:
    """Make a context in which torch raises an error if the host waits for the device.

    If `is_forbidden` is False, waiting is allowed.
    """
    torch.cuda.set_sync_debug_mode("error" if is_forbidden else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def dummy_tensors(spec: ModelSpec) -> list[tuple[str, torch.Tensor]]:
    """Return random weights. They are drawn on the CPU, as kinds of devices draw different numbers."""
    weights = Weights(spec, range(spec.num_layers), torch.float32, torch.device("cpu"), part_of(spec))
    return list(weights.dummy_tensors(seed=1))


def greedy(
    spec: ModelSpec, tensors: list[tuple[str, torch.Tensor]], device: str, *, allow_native: bool = False
) -> tuple[list[list[int]], torch.Tensor]:
    """Return the greedy tokens of every sequence, and the logits of the last step.

    The logits are `[S, vocab_size]` in float32 on the CPU. Prompts are prefilled in chunks, in one batch with
    the decode steps of shorter prompts.
    """
    model = DecoderModel(spec, range(spec.num_layers), torch.float32, device, allow_native=allow_native)
    model.load_weights(tensors)
    kv = DeviceKVCache(spec, model.layers, 40, _PAGE_SIZE, torch.float32, device)
    warm_up(model, kv)
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(spec.vocab_size, (n,), generator=generator).tolist() for n in _PROMPT_LENS]
    tables = [kv.pages.allocate(-(-(n + _NUM_NEW) // _PAGE_SIZE))[::-1] for n in _PROMPT_LENS]
    num_cached = [0] * len(texts)
    last_logits = torch.zeros(len(texts), spec.vocab_size)
    while True:
        running = [s for s, n in enumerate(_PROMPT_LENS) if len(texts[s]) < n + _NUM_NEW]
        if not running:
            return texts, last_logits
        chunks = [Chunk(texts[s][num_cached[s] :][:_CHUNK_SIZE], num_cached[s], tables[s]) for s in running]
        batch = Batch.build(chunks, kv)
        # The first decode step of a batch size may wait for the device, as it captures a graph.
        is_prefill = batch.num_tokens > len(chunks)
        with _no_waiting(is_forbidden=model.computed_by == "triton" and is_prefill):
            logits = model.forward(batch, kv)
        logits = logits.cpu()
        for row, (s, chunk) in enumerate(zip(running, chunks, strict=True)):
            num_cached[s] += len(chunk.token_ids)
            if num_cached[s] == len(texts[s]):
                texts[s].append(int(logits[row].argmax()))
                last_logits[s] = logits[row]
