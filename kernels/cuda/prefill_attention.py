"""Causal attention of chunks of prompts over paged KVCache: several sequences, concatenated without padding.

One program attends with a tile of (token, head of the group) pairs to all keys that they see, so K and V are
read once for all heads of a group. Blocks of keys before the tile's first query need no mask. Blocks on the
diagonal are masked; with a sliding window, all blocks are masked. `hopper_prefill` does the same faster, on
Hopper's SMs only; `prefill_attention` chooses.

Reference: `kernels.cuda.spans.attention_reference`. FLOP: `flops`. Bytes moved: the keys and values that a
tile sees, once for each tile; queries read and results written once.

Owns: the kernel, its launch, the tile, the choice between the two kernels. Does not know: layers, requests.
"""

import logging
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import launch
from kernels.cuda.paging import LOG2_E, UNLIMITED_WINDOW, block_dim, check_attention, key_offsets
from kernels.cuda.spans import Spans

log = logging.getLogger(__name__)


class PrefillTile(NamedTuple):
    """The shape and launch parameters of the kernel.

    They are: (token, head) pairs, keys of one step, warps, steps in flight.
    """

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int

    def num_tokens(self, group: int) -> int:
        """Return the number of tokens of a tile when `group` query heads share a KV head."""
        return max(1, self.block_rows // group)


def default_tile(dtype: torch.dtype, head_dim: int) -> PrefillTile:
    """Return a tile that fits into the registers and shared memory of Hopper's SMs."""
    if dtype is torch.float32:
        return PrefillTile(32, 32, 4, 1)
    if head_dim > 128:
        return PrefillTile(128, 64, 8, 2)
    return PrefillTile(128, 128 if head_dim <= 64 else 64, 8, 3)


@cache
def hopper_kernel(device: torch.device) -> ModuleType | None:
    """Return the module `hopper_prefill` for a Hopper GPU.

    Returns None for other devices, and if this Triton has no Gluon.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        from kernels.cuda import hopper_prefill
    except (ImportError, AttributeError) as error:  # Gluon is experimental: names change
        log.warning(
            "prefill attention computes with its slower kernel, Triton %s: %s", triton.__version__, error
        )
        return None
    return hopper_prefill


def flops(query_lens: list[int], kv_lens: list[int], num_heads: int, head_dim: int) -> int:
    """Return the FLOP of attention's two matrix products, queries by keys and weights by values.

    Each pair of a query head and a key that it sees costs 4 FLOP for each of `head_dim` elements. Only for
    attention without a sliding window.
    """
    num_scores = sum(n * kv_len - n * (n - 1) // 2 for n, kv_len in zip(query_lens, kv_lens, strict=True))
    return 4 * num_scores * num_heads * head_dim


@triton.jit
def _attend_keys(
    q, query_at, kv_layer, pages, kv_head, begin, stop, end, scale, window, highest, total, result,
    IS_MASKED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Attend to the keys [begin, stop); keys from `end` on do not exist."""
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    for start in range(begin, stop, BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        is_key = keys < end
        offsets = key_offsets(
            pages, keys, start, is_key, kv_head, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, BLOCK_KEYS
        )
        k_at = kv_layer + offsets[None, :] + dim[:, None]
        v_at = kv_layer + PAGE_SIZE * HEAD_DIM + offsets[:, None] + dim[None, :]
        if IS_MASKED:
            # Memory behind the last token may hold NaN, and 0 * NaN is NaN: so it is not even loaded.
            k = tl.load(k_at, mask=is_key[None, :] & is_dim[:, None], other=0.0)
            v = tl.load(v_at, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        elif BLOCK_DIM == HEAD_DIM:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=is_dim[:, None], other=0.0)
            v = tl.load(v_at, mask=is_dim[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if IS_MASKED:
            distance = query_at[:, None] - keys[None, :]
            scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # If a window hides all keys so far from a row, its weights are exp2(-inf - 0) = 0, not NaN.
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest) if IS_MASKED else new_highest
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, 1)
        result = tl.dot(weights.to(v.dtype), v, acc=result * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, result


@triton.jit
def _attend_tile(
    query, kv_layer, spans, pages, out, lse, query_stride, scale, window,
    HAS_WINDOW: tl.constexpr, HAS_LSE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPAN_FIELDS: tl.constexpr,
):  # fmt: skip
    """Compute attention for one span and one KV head. `scale` includes LOG2_E."""
    span, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(spans + span * SPAN_FIELDS)
    num_tokens = tl.load(spans + span * SPAN_FIELDS + 1).to(tl.int32)
    position = tl.load(spans + span * SPAN_FIELDS + 2).to(tl.int32)
    pages += tl.load(spans + span * SPAN_FIELDS + 3)
    end = position + num_tokens

    pair = tl.arange(0, BLOCK_ROWS)
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    is_pair = token < num_tokens
    is_element = is_pair[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = (row + token)[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(query + q_at, mask=is_element, other=0.0)

    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    # Two passes over the keys: first those that all queries see, without a mask; then the rest, with one.
    if HAS_WINDOW:
        # With a window the queries see different keys from the first block on: all are masked.
        masked_from = tl.maximum(0, position - window + 1) // BLOCK_KEYS * BLOCK_KEYS
    else:
        # Every query of the tile sees the keys up to the first one's position.
        masked_from = (position + 1) // BLOCK_KEYS * BLOCK_KEYS
        highest, total, result = _attend_keys(
            q, position + token, kv_layer, pages, kv_head, 0, masked_from, end, scale, window,
            highest, total, result, False, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, BLOCK_KEYS,
        )  # fmt: skip
    highest, total, result = _attend_keys(
        q, position + token, kv_layer, pages, kv_head, masked_from, end, end, scale, window,
        highest, total, result, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_DIM, PAGE_SIZE, BLOCK_KEYS,
    )  # fmt: skip

    total = tl.where(total > 0, total, 1.0)  # rows without a query: not 0 / 0
    result = result / total[:, None]
    at = (row + token) * (NUM_KV_HEADS * GROUP) + head
    tl.store(out + at[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=is_element)
    if HAS_LSE:
        tl.store(lse + at, (highest + tl.log2(total)) * 0.6931471805599453, mask=is_pair)


def prefill_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    spans: Spans,
    scale: float,
    out: torch.Tensor,
    *,
    sliding_window: int | None = None,
    lse: torch.Tensor | None = None,
    tile: PrefillTile | None = None,
) -> None:
    """Write attention into the rows of `out` that `spans` cover; other rows stay as they are.

    Arguments are those of `decode_attention`, with two differences. Spans have up to
    `tile.num_tokens(num_heads // num_kv_heads)` tokens; `plan_spans` must have been called with this number.
    Without `tile` the tile is `default_tile`'s; then, on a Hopper GPU, `hopper_prefill` computes the tensors
    that it supports. Raises ValueError for other tensors.
    """
    check_attention(query, kv_layer, spans, sliding_window, out, lse)
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, _, page_size, _ = kv_layer.shape
    hopper = hopper_kernel(query.device) if tile is None else None
    tile = tile or default_tile(query.dtype, head_dim)
    if num_heads // num_kv_heads > tile.block_rows:
        raise ValueError(
            f"expected at most {tile.block_rows} query heads a KV head, got {num_heads // num_kv_heads}"
        )
    if len(spans) == 0:
        return
    if hopper is not None and hopper.is_for(query, kv_layer):
        hopper.attend(query, kv_layer, spans, scale, out, sliding_window, lse)
        return
    launch(
        _attend_tile, (len(spans), num_kv_heads),
        query, kv_layer, spans.table, spans.pages, out, lse if lse is not None else out,
        query.stride(0), scale * LOG2_E, sliding_window or UNLIMITED_WINDOW,
        HAS_WINDOW=sliding_window is not None, HAS_LSE=lse is not None,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_DIM=block_dim(head_dim), PAGE_SIZE=page_size,
        BLOCK_ROWS=tile.block_rows, BLOCK_KEYS=tile.block_keys, SPAN_FIELDS=spans.table.shape[1],
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
