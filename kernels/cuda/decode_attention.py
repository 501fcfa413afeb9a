"""Attention of single queries over paged KVCache, split over the sequence (flash-decoding).

The keys of one sequence and KV head are divided among several programs, each of which attends to its part
with all query heads of the group; a second kernel merges the parts by their log-sum-exp. Where there is one
part, its program writes the result itself. The grid depends on the number of queries only, so a captured
graph serves every context length: each sequence has as many parts as its span says, and programs of further
parts end at once.

Reference: `kernels.cuda.spans.attention_reference`. Bytes moved: `bytes_moved`; they take longer than the
arithmetic, 4 FLOP for every query head and element of K.

Owns: the kernels, their launch. Does not know: layers, requests.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.cuda.launch import launch
from kernels.cuda.paging import LOG2_E, UNLIMITED_WINDOW, block_dim, check_attention, key_offsets
from kernels.cuda.spans import Spans

LN_2 = tl.constexpr(0.6931471805599453)
_MAX_SPLITS = 64
_MAX_PROGRAMS_PER_SM = 16
"""The most programs in the grid for each SM, programs without a part included."""
_PROGRAMS_PER_SM = 4
"""Programs of one SM that keep the memory busy; an SM can run all of them at once."""
_MOST_IMBALANCE = 1.5
"""The most keys of a part, as a multiple of the keys that each program would have in an even division.

An even division would give each SM `_PROGRAMS_PER_SM` programs with the same number of keys.
"""
_PART_MULTIPLE = 64
"""The length of every part is a multiple of this number.

This number is a multiple of every tile's number of keys.
"""


class DecodeTile(NamedTuple):
    """The shape and launch parameters of the splitting kernel: keys of one step, warps, steps in flight."""

    block_keys: int
    num_warps: int
    num_stages: int


def default_tile(dtype: torch.dtype, head_dim: int) -> DecodeTile:
    """Return a tile so small that an SM runs several programs, whose loads in flight keep the memory busy."""
    if dtype is torch.float32 or head_dim > 128:
        return DecodeTile(32, 4, 2)
    return DecodeTile(64, 4, 3)


def pick_num_splits(num_queries: int, num_kv_heads: int, num_sms: int) -> int:
    """Return the largest number of parts of a sequence for which the grid has room, a power of two."""
    most = _MAX_PROGRAMS_PER_SM * num_sms // max(1, num_queries * num_kv_heads)
    return min(_MAX_SPLITS, 1 << max(0, most.bit_length() - 1))


def pick_part_keys(num_keys: np.ndarray, num_kv_heads: int, num_sms: int) -> int:
    """Return the number of keys of a part, for decoded sequences that see `num_keys` keys (int64 `[S]`).

    Parts are long, as each costs a partial result, but not so long that all programs wait for a single one.
    """
    balanced = num_keys.sum() * num_kv_heads / (_PROGRAMS_PER_SM * num_sms)
    longest = int(num_keys.max())
    num_parts = -(-longest // max(_PART_MULTIPLE, int(_MOST_IMBALANCE * balanced)))
    return -(-longest // (num_parts * _PART_MULTIPLE)) * _PART_MULTIPLE


def bytes_moved(kv_lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, item_bytes: int) -> int:
    """Return the bytes moved, without partial results: K, V, queries are read once, results written once."""
    return (2 * sum(kv_lens) * num_kv_heads + 2 * len(kv_lens) * num_heads) * head_dim * item_bytes


@triton.jit
def _parts(span, window, num_splits, BLOCK_KEYS: tl.constexpr):
    """Return the fields of a span, and its division into parts.

    The result: row, visible keys [first, end), beginning of the sequence's page table, keys of a part, number
    of parts. There are at least 1 and at most `num_splits` parts. The first part begins at the block with the
    first visible key.
    """
    end = (tl.load(span + 1) * (tl.load(span + 2) + 1)).to(tl.int32)
    first = tl.maximum(0, end - window)
    num_blocks = tl.cdiv(end, BLOCK_KEYS) - first // BLOCK_KEYS
    part_keys = tl.maximum(tl.cdiv(num_blocks, num_splits) * BLOCK_KEYS, tl.load(span + 4).to(tl.int32))
    num_parts = tl.maximum(1, tl.cdiv(num_blocks * BLOCK_KEYS, tl.maximum(BLOCK_KEYS, part_keys)))
    return tl.load(span), first, end, tl.load(span + 3), part_keys, num_parts


# Not specialised: a new number of splits would compile the kernel anew, while requests wait.
@triton.jit(do_not_specialize=["num_splits"])
def _attend_part(
    query, kv_layer, spans, pages, parts, part_lse, out, lse, query_stride, scale, window, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, SPAN_FIELDS: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Compute attention for one sequence, KV head and part of the keys.

    `scale` includes LOG2_E; `part_lse` is to base 2.

    The result goes to `parts` and `part_lse` or, if there is one part, to `out` and `lse`.
    """
    span, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first_seen, end, first_page, part_keys, num_parts = _parts(
        spans + span * SPAN_FIELDS, window, num_splits, BLOCK_KEYS
    )
    if split >= num_parts:
        return
    pages += first_page
    # This program's keys, [begin, stop): a part of the keys in the window, in whole blocks.
    begin = first_seen // BLOCK_KEYS * BLOCK_KEYS + split * part_keys
    stop = tl.minimum(end, begin + part_keys)

    # The query heads of one KV head are the rows of the matrix products.
    member = tl.arange(0, GROUP_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    is_member, is_dim = member < GROUP, dim < HEAD_DIM
    head = kv_head * GROUP + member
    q = tl.load(
        query + row * query_stride + head[:, None] * HEAD_DIM + dim[None, :],
        mask=is_member[:, None] & is_dim[None, :], other=0.0,
    )  # fmt: skip
    # Softmax online: the highest score so far, and sum and weighted values in relation to it.
    highest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    result = tl.zeros([GROUP_ROWS, BLOCK_DIM], tl.float32)
    for start in range(begin, stop, BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        is_key = keys < stop
        offsets = key_offsets(
            pages, keys, start, is_key, kv_head, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, BLOCK_KEYS
        )
        # Memory behind the last token may hold NaN, and 0 * NaN is NaN: so it is not even loaded.
        k = tl.load(
            kv_layer + offsets[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )
        v = tl.load(
            kv_layer + PAGE_SIZE * HEAD_DIM + offsets[:, None] + dim[None, :],
            mask=is_key[:, None] & is_dim[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where((is_key & (keys >= first_seen))[None, :], scores, float("-inf"))
        # `new_highest` is never -inf, because the first block has a visible key.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        result = tl.dot(weights.to(v.dtype), v, acc=result * shrink[:, None], input_precision="ieee")
        highest = new_highest

    # Without keys, highest is -inf and total 0: an empty part's weight in the merge is 0.
    divisor = tl.where(total > 0, total, 1.0)
    log_mass = highest + tl.log2(divisor)
    result /= divisor[:, None]
    is_result = is_member[:, None] & is_dim[None, :]
    if IS_SPLIT and num_parts > 1:
        part = (span * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
        tl.store(part_lse + part, log_mass, mask=is_member)
        tl.store(parts + part[:, None] * HEAD_DIM + dim[None, :], result, mask=is_result)
    else:
        of_row = row * (NUM_KV_HEADS * GROUP) + head
        to = of_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=is_result)
        if HAS_LSE:
            tl.store(lse + of_row, log_mass * LN_2, mask=is_member)


@triton.jit
def _merge_parts(
    parts, part_lse, spans, out, lse, window,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, SPAN_FIELDS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the parts' results of one query and head: the mean, weighted by the softmax denominators."""
    span, head = tl.program_id(0), tl.program_id(1)
    row, _, _, _, _, num_parts = _parts(spans + span * SPAN_FIELDS, window, NUM_SPLITS, BLOCK_KEYS)
    if num_parts == 1:
        return
    split, dim = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_DIM)
    is_part, is_dim = split < num_parts, dim < HEAD_DIM
    part = (span * NUM_HEADS + head) * NUM_SPLITS + split
    logs = tl.load(part_lse + part, mask=is_part, other=float("-inf"))
    highest = tl.max(logs, 0)
    weights = tl.exp2(logs - highest)
    total = tl.sum(weights, 0)
    results = tl.load(
        parts + part[:, None] * HEAD_DIM + dim[None, :], mask=is_part[:, None] & is_dim[None, :], other=0.0
    )
    result = tl.sum(results * weights[:, None], 0) / total
    to = (row * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(out + to, result.to(out.dtype.element_ty), mask=is_dim)
    if HAS_LSE:
        tl.store(lse + row * NUM_HEADS + head, (highest + tl.log2(total)) * LN_2)


def decode_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    spans: Spans,
    scale: float,
    num_splits: int,
    out: torch.Tensor,
    *,
    sliding_window: int | None = None,
    lse: torch.Tensor | None = None,
    tile: DecodeTile | None = None,
) -> None:
    """Write attention into the rows of `out` that `spans` name; other rows stay as they are.

    Spans have at most one token each. `query`, `out`: `[T, num_heads, head_dim]` in the pages' dtype; tokens
    of `query` may lie apart, the heads of a token may not. Query head h uses KV head `h // (num_heads //
    num_kv_heads)`. `kv_layer`: contiguous `[num_pages, num_kv_heads, 2, page_size, head_dim]` of float32,
    bfloat16 or float16, with the new tokens. The query at position p sees the keys at `(p - sliding_window,
    p]`. `scale` multiplies the scores. `lse`, float32 `[T, num_heads]`, takes the natural logarithm of each
    softmax's denominator. `num_splits`: see `pick_num_splits`; spans may ask for fewer and longer parts
    (`pick_part_keys`). Raises ValueError for other tensors; page numbers are checked by `plan_spans` only.
    """
    check_attention(query, kv_layer, spans, sliding_window, out, lse)
    if num_splits < 1 or num_splits & (num_splits - 1):
        raise ValueError(f"expected a power of two for num_splits, got {num_splits}")
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, _, page_size, _ = kv_layer.shape
    if len(spans) == 0:
        return
    tile = tile or default_tile(query.dtype, head_dim)
    group = num_heads // num_kv_heads
    is_split = num_splits > 1
    part_shape = (len(spans), num_heads, num_splits if is_split else 0)
    parts = torch.empty((*part_shape, head_dim), dtype=torch.float32, device=query.device)
    part_lse = torch.empty(part_shape, dtype=torch.float32, device=query.device)
    lse_out = part_lse if lse is None else lse
    launch(
        _attend_part, (len(spans), num_kv_heads, num_splits),
        query, kv_layer, spans.table, spans.pages, parts, part_lse, out, lse_out,
        query.stride(0), scale * LOG2_E, sliding_window or UNLIMITED_WINDOW, num_splits,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, BLOCK_DIM=block_dim(head_dim), PAGE_SIZE=page_size,
        BLOCK_KEYS=tile.block_keys, SPAN_FIELDS=spans.table.shape[1],
        IS_SPLIT=is_split, HAS_LSE=lse is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if is_split:
        launch(
            _merge_parts, (len(spans), num_heads),
            parts, part_lse, spans.table, out, lse_out, sliding_window or UNLIMITED_WINDOW,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_DIM=block_dim(head_dim), NUM_SPLITS=num_splits,
            BLOCK_KEYS=tile.block_keys, SPAN_FIELDS=spans.table.shape[1], HAS_LSE=lse is not None,
            num_warps=4,
        )  # fmt: skip
