"""The speed of each kernel at the shapes of Llama-3-8B, as a share of the device's ceilings.

Owns: shapes, limits (*bars*), counts of bytes and FLOP. Does not know: whole models.
"""

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.gpu.ceilings import Ceilings, seconds
from benchmarks.gpu.llama import LLAMA_3_8B
from benchmarks.report import Report
from kernels.cuda import decode_attention as decode
from kernels.cuda import kv_quantise, kv_write, page_copy, rms_norm, silu_mul
from kernels.cuda import prefill_attention as prefill
from kernels.cuda.spans import SpanPlan, Spans, plan_spans

PAGE_SIZE = 64
CONTEXT_LEN, BATCH_SIZE, CHUNK_LEN = 8192, 64, 4096
COPY_BAR, PREFILL_BAR = 0.85, 0.60
DTYPE = torch.bfloat16
_NUM_PAGES = BATCH_SIZE * CONTEXT_LEN // PAGE_SIZE
_H, _KVH, _D = LLAMA_3_8B.num_heads, LLAMA_3_8B.num_kv_heads, LLAMA_3_8B.head_dim
_SCALE = _D**-0.5


def run(report: Report) -> None:
    """Measure the kernels, and add their tables to a report."""
    ceilings = Ceilings.measure(report)
    kv_layer = _random(_NUM_PAGES, _KVH, 2, PAGE_SIZE, _D)
    ceilings.begin(
        f"Kernels that move KVCache: one layer of Llama-3-8B, bfloat16, pages of {PAGE_SIZE} tokens"
    )
    _decode(ceilings, kv_layer)
    _copies(ceilings, kv_layer)
    ceilings.begin("Between the products")
    _elementwise(ceilings, kv_layer)
    ceilings.begin(f"Prefill: the last {CHUNK_LEN} tokens of a context of {CONTEXT_LEN}, one layer")
    _prefill(ceilings, kv_layer)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def _spans(query_len: int, num_sequences: int, tile_tokens: int) -> tuple[Spans, Spans]:
    """Return the spans of sequences of CONTEXT_LEN tokens, whose pages are in random order."""
    tables = np.random.default_rng(0).permutation(_NUM_PAGES).reshape(-1, CONTEXT_LEN // PAGE_SIZE)
    lens = [query_len] * num_sequences, [CONTEXT_LEN] * num_sequences
    plan: SpanPlan = plan_spans(*lens, list(tables[:num_sequences]), _NUM_PAGES, PAGE_SIZE, tile_tokens)
    pages = torch.from_numpy(plan.pages).cuda()
    decode_spans, prefill_spans = (
        Spans(torch.from_numpy(t).cuda(), pages) for t in (plan.decode, plan.prefill)
    )
    return decode_spans, prefill_spans


def _decode(ceilings: Ceilings, kv_layer: torch.Tensor) -> None:
    num_sms = torch.cuda.get_device_properties(kv_layer.device).multi_processor_count
    for batch_size in (1, 8, BATCH_SIZE):
        spans, _ = _spans(1, batch_size, 1)
        query = _random(batch_size, _H, _D)
        out = torch.empty_like(query)
        num_splits = decode.pick_num_splits(batch_size, _KVH, num_sms)
        spans.table[:, 4] = decode.pick_part_keys(np.full(batch_size, CONTEXT_LEN), _KVH, num_sms)

        def attend() -> None:
            decode.decode_attention(query, kv_layer, spans, _SCALE, num_splits, out)  # noqa: B023

        num_bytes = decode.bytes_moved([CONTEXT_LEN] * batch_size, _H, _KVH, _D, DTYPE.itemsize)
        # One context of a layer is smaller than the L2 cache and than a launch is long: no bar.
        bar = COPY_BAR if batch_size == BATCH_SIZE else None
        ceilings.bytes_row(
            f"decode attention, {batch_size} x {CONTEXT_LEN} tokens", num_bytes, seconds(attend), bar
        )


def _copies(ceilings: Ceilings, kv_layer: torch.Tensor) -> None:
    num_pages = _NUM_PAGES // 4
    pages = torch.randperm(_NUM_PAGES, device="cuda")[:num_pages]
    blocks = page_copy.gather_pages(kv_layer, pages)
    num_bytes = 2 * blocks.numel() * blocks.element_size()
    name = f"of {num_pages * PAGE_SIZE // CONTEXT_LEN} x {CONTEXT_LEN} tokens"
    gather_s = seconds(lambda: page_copy.gather_pages(kv_layer, pages, out=blocks))
    ceilings.bytes_row(f"gather {name}", num_bytes, gather_s, COPY_BAR)
    scatter_s = seconds(lambda: page_copy.scatter_pages(kv_layer, pages, blocks))
    ceilings.bytes_row(f"scatter {name}", num_bytes, scatter_s, COPY_BAR)
    ceilings.bytes_row("torch: index_select", num_bytes, seconds(lambda: kv_layer.index_select(0, pages)))
    num_bytes = kv_quantise.bytes_moved(num_pages, _KVH, PAGE_SIZE, _D, DTYPE.itemsize)
    for encoding in kv_quantise.Encoding:
        numbers, scales = kv_quantise.quantise_pages(kv_layer, pages, encoding)
        time_s = seconds(lambda: kv_quantise.quantise_pages(kv_layer, pages, encoding))  # noqa: B023
        ceilings.bytes_row(f"quantise, {encoding.name}", num_bytes, time_s)
        time_s = seconds(lambda: kv_quantise.dequantise_pages(kv_layer, pages, numbers, scales))  # noqa: B023
        ceilings.bytes_row(f"dequantise, {encoding.name}", num_bytes, time_s)


def _elementwise(ceilings: Ceilings, kv_layer: torch.Tensor) -> None:
    spec, num_tokens = LLAMA_3_8B, 4 * CHUNK_LEN
    x, residual, weight = (_random(num_tokens, spec.hidden_size) for _ in range(3))
    time_s = seconds(lambda: rms_norm.add_rms_norm(x, residual, weight[0], 1e-5))
    num_bytes = rms_norm.bytes_moved(num_tokens, spec.hidden_size, DTYPE.itemsize, has_residual=True)
    ceilings.bytes_row(f"addition and rms norm, {num_tokens} tokens", num_bytes, time_s)
    gate_up = _random(num_tokens, 2 * spec.intermediate_size)
    num_bytes = silu_mul.bytes_moved(num_tokens, spec.intermediate_size, DTYPE.itemsize)
    ceilings.bytes_row(f"silu, {num_tokens} tokens", num_bytes, seconds(lambda: silu_mul.silu_mul(gate_up)))
    qkv, angles = _random(num_tokens, _H + 2 * _KVH, _D), torch.rand(num_tokens, _D // 2, device="cuda")
    places = torch.arange(num_tokens, device="cuda")
    slots = kv_write.TokenSlots(angles, angles, places // PAGE_SIZE, places % PAGE_SIZE)
    num_bytes = kv_write.bytes_moved(num_tokens, _H + 2 * _KVH, _D, DTYPE.itemsize)
    time_s = seconds(lambda: kv_write.rotate_and_write(qkv, kv_layer, slots))
    ceilings.bytes_row(f"rotation and page write, {num_tokens} tokens", num_bytes, time_s)


def _prefill(ceilings: Ceilings, kv_layer: torch.Tensor) -> None:
    spec = LLAMA_3_8B
    tile = prefill.default_tile(DTYPE, _D)
    _, spans = _spans(CHUNK_LEN, 1, tile.num_tokens(_H // _KVH))
    query = _random(CHUNK_LEN, _H, _D)
    out = torch.empty_like(query)
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    sizes = ((hidden, (_H + 2 * _KVH) * _D), (_H * _D, hidden), (hidden, 2 * ffn), (ffn, hidden))
    products = [(_random(CHUNK_LEN, n), _random(m, n)) for n, m in sizes]

    def attend() -> None:
        prefill.prefill_attention(query, kv_layer, spans, _SCALE, out)

    def layer() -> None:
        attend()
        for x, weight in products:
            linear(x, weight)

    attention_flops = prefill.flops([CHUNK_LEN], [CONTEXT_LEN], _H, _D)
    product_flops = sum(2 * CHUNK_LEN * n * m for n, m in sizes)
    ceilings.flops_row("attention", attention_flops, seconds(attend), PREFILL_BAR)
    ceilings.flops_row("attention and products", attention_flops + product_flops, seconds(layer), PREFILL_BAR)
    if prefill.hopper_kernel(query.device) is not None:
        time_s = seconds(lambda: prefill.prefill_attention(query, kv_layer, spans, _SCALE, out, tile=tile))
        ceilings.flops_row("attention by the kernel for all GPUs", attention_flops, time_s)
    _torch_attention(ceilings)


def _torch_attention(ceilings: Ceilings) -> None:
    """Measure torch's attention over a whole prompt, because torch is slower for a chunk at a context's end.

    Keys and values are contiguous. Each query head has its own keys and values, because torch would copy
    grouped heads.
    """
    query, keys, values = (_random(1, _H, CONTEXT_LEN, _D) for _ in range(3))
    num_flops = prefill.flops([CONTEXT_LEN], [CONTEXT_LEN], _H, _D)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            time_s = seconds(lambda: scaled_dot_product_attention(query, keys, values, is_causal=True))
        ceilings.flops_row(f"torch: {backend.name}, a prompt of {CONTEXT_LEN}", num_flops, time_s)
