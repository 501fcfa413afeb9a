"""Prefill attention for Hopper's SMs, in Gluon, Triton's lower-level language.

A program attends with 128 (token, head of the group) pairs to all keys that they see. One warp copies blocks
of keys and of values to two rings in shared memory (TMA); two warpgroups have 64 pairs each. A warpgroup
starts the product for the scores of a block and the product with the values of the block before. It computes
the softmax of the scores while the second product runs, as FlashAttention-3 does (Shah et al., 2024, section
3.2).

Reference: `kernels.cuda.spans.attention_reference`. FLOP and bytes moved: `kernels.cuda.prefill_attention`.

Owns: the kernel, its launch, the check which tensors it supports. Does not know: the kernel for other GPUs,
layers, requests.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.cuda.launch import launch
from kernels.cuda.paging import LOG2_E, UNLIMITED_WINDOW
from kernels.cuda.spans import Spans

BLOCK_ROWS = 128
"""The number of (token, head) pairs of a program. A span has at most `BLOCK_ROWS // group` tokens."""
BLOCK_KEYS = 64
HEAD_DIMS = (64, 128)
NUM_STAGES = 3
"""The number of blocks in each of the two rings, of keys and of values."""
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

# Triton 3.6 has the names on the left, later versions those on the right.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load_async = (
    tma.async_copy_global_to_shared if hasattr(tma, "async_copy_global_to_shared") else tma.async_load
)


def is_for(query: torch.Tensor, kv_layer: torch.Tensor) -> bool:
    """Return whether this kernel supports these tensors, which have passed `check_attention`."""
    _, _, _, page_size, head_dim = kv_layer.shape
    return query.dtype in _DTYPES and head_dim in HEAD_DIMS and page_size % BLOCK_KEYS == 0


@gluon.jit
def _produce(
    kv_rows, pages, kv_head, begin, num_blocks, ring,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the blocks of keys and values from position `begin` on to the rings."""
    k_ring, v_ring, k_full, v_full, k_free, v_free = ring
    for block in range(num_blocks):
        stage = block % STAGES
        parity = ((block // STAGES) & 1) ^ 1
        start = begin + block * BLOCK_KEYS
        page = gl.load(pages + start // PAGE_SIZE).to(gl.int32)
        row = (page * NUM_KV_HEADS + kv_head) * (2 * PAGE_SIZE) + start % PAGE_SIZE
        mbarrier.wait(k_free.index(stage), parity)
        mbarrier.expect(k_full.index(stage), kv_rows.block_type.nbytes)
        _load_async(kv_rows, [row, 0], k_full.index(stage), k_ring.index(stage))
        mbarrier.wait(v_free.index(stage), parity)
        mbarrier.expect(v_full.index(stage), kv_rows.block_type.nbytes)
        _load_async(kv_rows, [row + PAGE_SIZE, 0], v_full.index(stage), v_ring.index(stage))


@gluon.jit
def _softmax(
    scores, highest, total, position, start, scale, window,
    IS_MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_KEYS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the block's weights, the new maximum and sum, and the factor for all earlier results."""
    if IS_MASKED:
        keys = (start + gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
        is_seen = keys <= position[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (keys > (position - window)[:, None])
        scores = gl.where(is_seen, scores, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(scores, 1) * scale)
    finite = new_highest
    if HAS_WINDOW:
        # If the window hides all keys so far from a row, its weights are exp2(-inf - 0) = 0, not NaN.
        finite = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = gl.exp2(scores * scale - finite[:, None])
    shrink = gl.exp2(highest - finite)
    return weights, new_highest, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _step(
    q, block, operand, highest, total, result, position, begin, scale, window, ring,
    IS_MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, BLOCK_KEYS: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute the scores of `block` and their softmax, and add the values of the block before to the result.

    The product with these values runs while the softmax is computed.
    """
    k_ring, v_ring, k_full, v_full, k_free, v_free = ring
    stage, before = block % STAGES, (block - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (block // STAGES) & 1)
    zero = gl.zeros([64, BLOCK_KEYS], gl.float32, S_LAYOUT)
    scores_token = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((block - 1) // STAGES) & 1)
    result_token = warpgroup_mma(operand, v_ring.index(before), result, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores_token])
    mbarrier.arrive(k_free.index(stage), count=1)
    weights, highest, total, shrink = _softmax(
        scores, highest, total, position, begin + block * BLOCK_KEYS, scale, window,
        IS_MASKED, HAS_WINDOW, BLOCK_KEYS, S_LAYOUT,
    )  # fmt: skip
    new_operand = gl.convert_layout(weights.to(k_ring.dtype), P_LAYOUT)
    # The compiler moves no operand of the wait behind it, so the softmax runs beside the product.
    result, operand, new_operand = warpgroup_mma_wait(0, deps=[result_token, operand, new_operand])
    mbarrier.arrive(v_free.index(before), count=1)
    result = result * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return new_operand, highest, total, result


@gluon.jit
def _consume(
    query, out, lse, span, kv_head, query_stride, scale, window, begin, num_blocks, q_half, ring,
    HALF: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_LSE: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute attention for one half of a tile's pairs, in one warpgroup."""
    row, num_tokens, position = span
    k_ring, v_ring, k_full, v_full, k_free, _ = ring
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    # The layout in which global memory is read: 16 bytes a thread.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    pair = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LINES))
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    at = (row + token)[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :]
    q_half.store(gl.load(query + at, mask=(token < num_tokens)[:, None], other=0.0))
    q = q_half.load(gl.DotOperandLayout(0, S_LAYOUT, 2))

    s_pair = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    s_token = s_pair // GROUP
    q_position = position + s_token
    highest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    result = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)

    mbarrier.wait(k_full.index(0), 0)
    zero = gl.zeros([64, BLOCK_KEYS], gl.float32, S_LAYOUT)
    scores_token = warpgroup_mma(q, k_ring.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores_token])
    mbarrier.arrive(k_free.index(0), count=1)
    weights, highest, total, _ = _softmax(
        scores, highest, total, q_position, begin, scale, window, True, HAS_WINDOW, BLOCK_KEYS, S_LAYOUT
    )
    operand = gl.convert_layout(weights.to(k_ring.dtype), P_LAYOUT)
    # All queries see the keys up to the first one's position; with a window they see different first keys.
    num_unmasked = 1 if HAS_WINDOW else gl.maximum(1, (position + 1) // BLOCK_KEYS)
    for block in range(1, num_unmasked):
        operand, highest, total, result = _step(
            q, block, operand, highest, total, result, q_position, begin, scale, window, ring,
            False, False, BLOCK_KEYS, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
    for block in range(num_unmasked, num_blocks):
        operand, highest, total, result = _step(
            q, block, operand, highest, total, result, q_position, begin, scale, window, ring,
            True, HAS_WINDOW, BLOCK_KEYS, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip

    last = num_blocks - 1
    v_last = v_ring.index(last % STAGES)
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    num_keys = position + num_tokens - begin - last * BLOCK_KEYS
    if num_keys < BLOCK_KEYS:
        # Memory behind the last token may hold NaN, and 0 * NaN is NaN. Both halves write the same values.
        key = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, LINES))
        v_last.store(gl.where((key < num_keys)[:, None], v_last.load(LINES), 0.0).to(v_ring.dtype))
        fence_async_shared()
        _barrier()
    result_token = warpgroup_mma(operand, v_last, result, is_async=True)
    result, operand = warpgroup_mma_wait(0, deps=[result_token, operand])
    result = result * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]

    o_pair = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
    o_dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
    o_token = o_pair // GROUP
    o_at = (row + o_token) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + o_pair % GROUP
    gl.store(
        out + o_at[:, None] * HEAD_DIM + o_dim[None, :],
        result.to(out.dtype.element_ty),
        mask=(o_token < num_tokens)[:, None],
    )
    if HAS_LSE:
        s_at = (row + s_token) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + s_pair % GROUP
        gl.store(lse + s_at, (highest + gl.log2(total)) * 0.6931471805599453, mask=s_token < num_tokens)


@gluon.jit
def _attend_tile_hopper(
    query, kv_rows, spans, pages, out, lse, query_stride, scale, window,
    HAS_WINDOW: gl.constexpr, HAS_LSE: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_KEYS: gl.constexpr, STAGES: gl.constexpr,
    SPAN_FIELDS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute attention for one KV head and one span, which has tokens. `scale` includes LOG2_E."""
    span, kv_head = gl.program_id(0), gl.program_id(1)
    row = gl.load(spans + span * SPAN_FIELDS)
    num_tokens = gl.load(spans + span * SPAN_FIELDS + 1).to(gl.int32)
    position = gl.load(spans + span * SPAN_FIELDS + 2).to(gl.int32)
    pages += gl.load(spans + span * SPAN_FIELDS + 3)
    begin = gl.maximum(0, position - window + 1) // BLOCK_KEYS * BLOCK_KEYS if HAS_WINDOW else 0
    num_blocks = (position + num_tokens - begin + BLOCK_KEYS - 1) // BLOCK_KEYS

    LAYOUT: gl.constexpr = kv_rows.layout
    k_ring = gl.allocate_shared_memory(kv_rows.dtype, [STAGES, BLOCK_KEYS, HEAD_DIM], LAYOUT)
    v_ring = gl.allocate_shared_memory(kv_rows.dtype, [STAGES, BLOCK_KEYS, HEAD_DIM], LAYOUT)
    q_halves = gl.allocate_shared_memory(kv_rows.dtype, [2, 64, HEAD_DIM], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    _barrier()
    ring = (k_ring, v_ring, k_full, v_full, k_free, v_free)
    gl.warp_specialize(
        [
            (_consume, (
                query, out, lse, (row, num_tokens, position), kv_head, query_stride, scale, window, begin,
                num_blocks, q_halves.index(0), ring,
                0, HAS_WINDOW, HAS_LSE, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_KEYS, STAGES,
            )),
            (_consume, (
                query, out, lse, (row, num_tokens, position), kv_head, query_stride, scale, window, begin,
                num_blocks, q_halves.index(1), ring,
                1, HAS_WINDOW, HAS_LSE, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_KEYS, STAGES,
            )),
            (_produce, (
                kv_rows, pages, kv_head, begin, num_blocks, ring, NUM_KV_HEADS, PAGE_SIZE, BLOCK_KEYS, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@cache
def _layout(dtype: torch.dtype, head_dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([BLOCK_KEYS, head_dim], _DTYPES[dtype])


def attend(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    spans: Spans,
    scale: float,
    out: torch.Tensor,
    sliding_window: int | None,
    lse: torch.Tensor | None,
) -> None:
    """Compute `prefill_attention` for tensors that `is_for` supports.

    Spans have 1 to `BLOCK_ROWS // group` tokens.
    """
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, _, page_size, _ = kv_layer.shape
    kv_rows = kv_layer.view(-1, head_dim)
    # Made for each call, in 3 us: a cached descriptor would keep the layer's memory from being freed.
    descriptor = TensorDescriptor(
        kv_rows, list(kv_rows.shape), [head_dim, 1], [BLOCK_KEYS, head_dim], _layout(query.dtype, head_dim)
    )
    launch(
        _attend_tile_hopper, (len(spans), num_kv_heads),
        query, descriptor, spans.table, spans.pages, out, lse if lse is not None else out,
        query.stride(0), scale * LOG2_E, sliding_window or UNLIMITED_WINDOW,
        HAS_WINDOW=sliding_window is not None, HAS_LSE=lse is not None,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        PAGE_SIZE=page_size, BLOCK_KEYS=BLOCK_KEYS, STAGES=NUM_STAGES, SPAN_FIELDS=spans.table.shape[1],
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4, num_stages=1,
    )  # fmt: skip
