"""Causal grouped-query attention over a paged KVCache: the torch reference.

Semantics: the query at position p of its sequence attends to the keys at positions `(p - window, p]`, or to
all keys up to p without a window. The softmax is computed in float32. Keys and values are read from pages.
The keys and values of the new tokens must have been written to their pages before.

Bytes moved: every page that a query can see is read once and written once to a contiguous buffer. The matrix
products read this buffer once per block of query rows. Chunks of several tokens run one after the other, in
blocks of rows that read no keys beyond their diagonal; all single-token queries (decode) run together.

Owns: the arithmetic and its plan of gathers and masks, made once per batch. Does not know: layers, requests,
the scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# Limits of a block of query rows: many rows make fast matrix products, few rows need few scores at a time.
_MAX_BLOCK_ROWS = 128
_MIN_BLOCK_ROWS = 16
_MAX_BLOCK_SCORES = 1 << 19
# Decode queries with at most this number of keys are computed together, however many keys each of them has.
_MIN_SPLIT_KEYS = 256


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """The form of the pages that a plan reads.

    Pages are `[num_pages, num_kv_heads, 2, page_size, head_dim]` of `dtype`.
    """

    num_kv_heads: int
    page_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """A block of query rows and the gathered keys to which they attend.

    The rows are `[row, row + num_rows)`, the keys `[first_key, first_key + num_keys)`. `mask` is `[num_rows,
    num_keys]`, added to the scores.
    """

    row: int
    num_rows: int
    first_key: int
    num_keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The plan of one chunk of several tokens. `page_rows`: int64 indices as `_page_rows` returns them."""

    page_rows: torch.Tensor
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The plan of single-token queries at `rows` (int64 `[B]`, ascending), padded to equal numbers of keys.

    `page_rows` are int64 indices as `_page_rows` returns them. `mask` is `[B, 1, 1, num_keys]`, added to the
    scores.
    """

    rows: torch.Tensor
    page_rows: torch.Tensor
    num_keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The gathers and masks of one batch, for all layers that share a sliding window."""

    prefills: tuple[PrefillPlan, ...]
    decodes: tuple[DecodePlan, ...]


def plan_attention(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_tables: Sequence[torch.Tensor],
    geometry: PageGeometry,
    sliding_window: int | None,
) -> AttentionPlan:
    """Return the plan of one forward pass over sequences, whose queries are concatenated in order.

    Sequence s has `query_lens[s] >= 1` new tokens, `kv_lens[s]` tokens in all (new tokens included); token t
    lies in page `page_tables[s][t // page_size]` (int64, on the CPU).
    """
    prefills: list[PrefillPlan] = []
    singles: list[_Single] = []
    row = 0
    for query_len, kv_len, pages in zip(query_lens, kv_lens, page_tables, strict=True):
        assert 1 <= query_len <= kv_len <= len(pages) * geometry.page_size
        first_seen = _first_seen(kv_len - query_len, sliding_window)
        first_page = first_seen // geometry.page_size
        seen = pages[first_page : -(-kv_len // geometry.page_size)]
        base = first_page * geometry.page_size
        if query_len == 1:
            singles.append(_Single(row, seen, first_seen - base, kv_len - base))
        else:
            prefills.append(_plan_prefill(row, query_len, kv_len, seen, base, geometry, sliding_window))
        row += query_len
    return AttentionPlan(tuple(prefills), tuple(_plan_decode(g, geometry) for g in _similar_lengths(singles)))


def paged_attention(
    query: torch.Tensor, kv_layer: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Return the attention of `query` [T, num_heads, head_dim] over the pages of one layer.

    The result has the shape and dtype of `query`. `kv_layer`: `[num_pages, num_kv_heads, 2, page_size,
    head_dim]`, with the new tokens written. Query head h uses KV head `h // (num_heads // num_kv_heads)`.
    `scale` multiplies the scores.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, _, page_size, _ = kv_layer.shape
    page_rows = kv_layer.view(-1, page_size * head_dim)
    grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty_like(grouped)
    for decode in plan.decodes:
        batch_size = len(decode.rows)
        kv = page_rows.index_select(0, decode.page_rows).view(2, batch_size, num_kv_heads, -1, head_dim)
        kv = kv[:, :, :, : decode.num_keys]
        is_whole = batch_size == num_tokens
        queries = grouped if is_whole else grouped.index_select(0, decode.rows)
        result = scaled_dot_product_attention(queries, kv[0], kv[1], attn_mask=decode.mask, scale=scale)
        if is_whole:
            return result.reshape(query.shape)
        out.index_copy_(0, decode.rows, result)
    for prefill in plan.prefills:
        kv = page_rows.index_select(0, prefill.page_rows).view(2, num_kv_heads, 1, -1, head_dim)
        for block in prefill.blocks:
            rows = slice(block.row, block.row + block.num_rows)
            keys = slice(block.first_key, block.first_key + block.num_keys)
            queries = grouped[rows].permute(1, 2, 0, 3)
            result = _attend(queries, kv[0, :, :, keys], kv[1, :, :, keys], block.mask, scale)
            out[rows] = result.permute(2, 0, 1, 3)
    return out.view(query.shape)


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention of a block of queries, in the shape of `queries`.

    `queries`: `[kv_heads, group, rows, d]`. `keys`, `values`: `[kv_heads, 1, num_keys, d]`. `mask` `[rows,
    num_keys]` is added to the scores.
    """
    num_kv_heads, group, num_rows, head_dim = queries.shape
    if queries.device.type == "cpu" and queries.dtype is torch.bfloat16:
        # Twice to three times as fast as torch's fused CPU kernel, whose bfloat16 products are slow.
        flat = queries.reshape(num_kv_heads, group * num_rows, head_dim)
        bias = mask.repeat(group, 1).expand(num_kv_heads, -1, -1)
        scores = torch.baddbmm(bias, flat, keys[:, 0].transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), values[:, 0]).view(queries.shape)
    # The group's heads share keys and values through a stride of 0, not through copies.
    shape = (num_kv_heads, group, keys.shape[2], head_dim)
    return scaled_dot_product_attention(
        queries, keys.expand(shape), values.expand(shape), attn_mask=mask, scale=scale
    )


@dataclass(frozen=True, slots=True)
class _Single:
    """A single-token query: its row, its pages, and the visible keys `[first, end)` within these pages."""

    row: int
    pages: torch.Tensor
    first: int
    end: int


def _first_seen(position: int, sliding_window: int | None) -> int:
    """Return the first key position that the query at `position` may see."""
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def _page_rows(pages: torch.Tensor, geometry: PageGeometry) -> torch.Tensor:
    """Return the indices of the rows of `pages` in a layer, int64, flat.

    The layer is viewed as rows `[num_pages * num_kv_heads * 2, page_size * head_dim]`. For `pages` [B, P] the
    indices are ordered [2, B, num_kv_heads, P], so that one `index_select` yields K and V as contiguous `[2,
    B, num_kv_heads, P * page_size, head_dim]`.
    """
    pages = pages.to(geometry.device)
    heads = torch.arange(geometry.num_kv_heads, device=geometry.device)[:, None]
    k_or_v = torch.arange(2, device=geometry.device)[:, None, None, None]
    return ((pages[:, None] * geometry.num_kv_heads + heads) * 2 + k_or_v).flatten()


def _plan_prefill(
    row: int,
    query_len: int,
    kv_len: int,
    pages: torch.Tensor,
    base: int,
    geometry: PageGeometry,
    sliding_window: int | None,
) -> PrefillPlan:
    """Return the plan of one chunk, whose first gathered key has position `base`."""
    start = kv_len - query_len
    num_seen = len(pages) * geometry.page_size
    block_rows = _MAX_BLOCK_SCORES // num_seen // _MIN_BLOCK_ROWS * _MIN_BLOCK_ROWS
    block_rows = min(_MAX_BLOCK_ROWS, max(_MIN_BLOCK_ROWS, block_rows))
    spans = [(s, min(s + block_rows, query_len)) for s in range(0, query_len, block_rows)]
    # The keys of a block begin with a whole page, so that its part of the mask is aligned for CUDA kernels.
    first_pages = [_first_seen(start + first, sliding_window) // geometry.page_size for first, _ in spans]
    first_keys = [page * geometry.page_size for page in first_pages]
    # One mask serves all blocks. Column c is the key `c - reach` positions after a block's first query.
    reach = max(start + first - first_key for (first, _), first_key in zip(spans, first_keys, strict=True))
    num_rows = min(block_rows, query_len)
    rows = torch.arange(num_rows, device=geometry.device)[:, None]
    distance = rows + reach - torch.arange(reach + num_rows, device=geometry.device)
    is_hidden = distance < 0 if sliding_window is None else (distance < 0) | (distance >= sliding_window)
    mask = _additive_mask(is_hidden, geometry)
    blocks: list[QueryBlock] = []
    for (first, end), first_key in zip(spans, first_keys, strict=True):
        num_keys = start + end - first_key
        left = reach - (start + first - first_key)
        columns = mask[: end - first, left : left + num_keys]
        blocks.append(QueryBlock(row + first, end - first, first_key - base, num_keys, columns))
    return PrefillPlan(_page_rows(pages[None], geometry), tuple(blocks))


def _plan_decode(group: Sequence[_Single], geometry: PageGeometry) -> DecodePlan:
    group = sorted(group, key=lambda single: single.row)
    num_pages = max(len(single.pages) for single in group)
    num_keys = max(single.end for single in group)
    # Rows are padded with a page of their own, so that no sequence ever reads another's.
    pages = torch.stack([_padded(single.pages, num_pages) for single in group])
    first, end = torch.tensor([[s.first, s.end] for s in group], device=geometry.device)[:, :, None].unbind(1)
    keys = torch.arange(num_keys, device=geometry.device)
    mask = _additive_mask((keys < first) | (keys >= end), geometry)[:, None, None]
    rows = torch.tensor([single.row for single in group], dtype=torch.int64, device=geometry.device)
    return DecodePlan(rows, _page_rows(pages, geometry), num_keys, mask)


def _padded(pages: torch.Tensor, num_pages: int) -> torch.Tensor:
    return torch.cat((pages, pages[-1:].expand(num_pages - len(pages))))


def _additive_mask(is_hidden: torch.Tensor, geometry: PageGeometry) -> torch.Tensor:
    """Return a mask in the pages' dtype, -inf where hidden and else 0.

    The mask is not boolean, as attention would convert a boolean mask in every call.
    """
    mask = torch.zeros(is_hidden.shape, dtype=geometry.dtype, device=geometry.device)
    return mask.masked_fill_(is_hidden, float("-inf"))


def _similar_lengths(singles: Sequence[_Single]) -> list[list[_Single]]:
    """Divide decode queries into groups with similar numbers of keys.

    Padding at most doubles the keys that are read for a query. Queries with up to `_MIN_SPLIT_KEYS` keys stay
    together all the same, as one more call costs more than their padding.
    """
    groups: list[list[_Single]] = []
    for single in sorted(singles, key=lambda s: -s.end):
        if groups and groups[-1][0].end <= max(_MIN_SPLIT_KEYS, 2 * single.end):
            groups[-1].append(single)
        else:
            groups.append([single])
    return groups
