"""Spans of queries and the pages of their sequences, which the attention kernels read.

A span is some consecutive new tokens of one sequence. Decode kernels take spans of one token, prefill kernels
spans of as many as fit into a tile.

Owns: the plan of a batch on the host, its checks, the torch reference of attention over spans. Does not know:
layers, requests, devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

SPAN_FIELDS = 5
"""The number of fields of a span.

The fields: row of the span's first query, number of tokens, first position, index of the first page, keys of
one part of a decoded sequence (`decode_attention`).
"""


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of a batch on the kernel's device, all int64.

    `table` `[N, SPAN_FIELDS]`. `pages` `[P]`: the page tables of all sequences, one after the other; token t
    of a span's sequence lies in page `pages[first page + t // page_size]`. A decode span may have no
    token: it reads nothing, and its row becomes zero. A prefill span has at least one token.
    """

    table: torch.Tensor
    pages: torch.Tensor

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """The plan of a batch on the host, int64.

    `decode`: spans of single-token queries. `prefill`: spans of longer chunks. `pages`: the page tables of
    all sequences.
    """

    decode: np.ndarray
    prefill: np.ndarray
    pages: np.ndarray


def plan_spans(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_tables: Sequence[np.ndarray],
    num_pages: int,
    page_size: int,
    tile_tokens: int,
) -> SpanPlan:
    """Return the spans of one forward pass over sequences, whose queries are concatenated in order.

    Sequence s has `query_lens[s] >= 1` new tokens, `kv_lens[s]` tokens in all (new tokens included); token t
    lies in page `page_tables[s][t // page_size]` of `num_pages`. Chunks are cut into spans of at most
    `tile_tokens` tokens, sorted so that spans with many keys, which take longest, begin first. The field with
    the keys of a part is left at 0. Raises ValueError if the arguments do not fit together.
    """
    if not len(query_lens) == len(kv_lens) == len(page_tables):
        raise ValueError(
            f"expected as many lengths as page tables, "
            f"got {len(query_lens)}, {len(kv_lens)} and {len(page_tables)}"
        )
    lens = np.array([query_lens, kv_lens], dtype=np.int64).reshape(2, -1)
    used = -(-lens[1] // page_size)
    room = np.array([len(table) for table in page_tables], dtype=np.int64)
    if not ((lens[0] >= 1) & (lens[0] <= lens[1]) & (used <= room)).all():
        raise ValueError(
            f"expected 1 <= new tokens <= all tokens <= room in the pages of {page_size}, "
            f"got {list(query_lens)}, {list(kv_lens)} and {room.tolist()} pages"
        )
    pages = np.concatenate([table[:n] for table, n in zip(page_tables, used, strict=True)])
    if pages.min() < 0 or pages.max() >= num_pages:
        raise ValueError(f"expected pages in [0, {num_pages}), got {pages.min()} to {pages.max()}")
    fields = [np.cumsum(lens[0]) - lens[0], lens[0], lens[1] - lens[0], np.cumsum(used) - used]
    chunks = np.stack([*fields, np.zeros_like(used)], axis=1)
    is_single = lens[0] == 1
    tiles = [_cut(chunk, tile_tokens) for chunk in chunks[~is_single]]
    prefill = np.concatenate(tiles) if tiles else np.empty((0, SPAN_FIELDS), dtype=np.int64)
    longest_first = np.argsort(-(prefill[:, 1] + prefill[:, 2]), kind="stable")
    return SpanPlan(chunks[is_single], prefill[longest_first], pages.astype(np.int64))


def _cut(chunk: np.ndarray, tile_tokens: int) -> np.ndarray:
    """Return the spans of one chunk, int64 `[N, SPAN_FIELDS]`. The chunk has the form of a span."""
    row, num_tokens, position, first_page, part_keys = chunk
    begins = np.arange(0, num_tokens, tile_tokens)
    lens = np.minimum(tile_tokens, num_tokens - begins)
    same = (np.full_like(begins, field) for field in (first_page, part_keys))
    return np.stack([row + begins, lens, position + begins, *same], axis=1)


def attention_reference(
    query: torch.Tensor, kv_layer: torch.Tensor, spans: Spans, scale: float, sliding_window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention kernels' result, computed span by span in float64. Waits for the device.

    Arguments are those of the kernels. Returns the result, float64 `[T, num_heads, head_dim]`, and the
    natural logarithm of each softmax's denominator, float64 `[T, num_heads]`. In rows that no span covers,
    the result is 0 and the logarithm is -inf.
    """
    num_heads, head_dim = query.shape[1:]
    _, num_kv_heads, _, page_size, _ = kv_layer.shape
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float64, device=query.device)
    for row, num_tokens, position, first_page, _ in spans.table.tolist():
        if num_tokens == 0:
            continue
        end = position + num_tokens
        pages = spans.pages[first_page : first_page + -(-end // page_size)]
        kv = (
            kv_layer[pages].double().permute(1, 2, 0, 3, 4).reshape(num_kv_heads, 2, -1, head_dim)[:, :, :end]
        )
        keys, values = kv.repeat_interleave(num_heads // num_kv_heads, dim=0).unbind(1)
        rows = slice(row, row + num_tokens)
        scores = torch.einsum("qhd,hkd->hqk", query[rows].double(), keys) * scale
        distance = torch.arange(position, end)[:, None] - torch.arange(end)
        is_hidden = (distance < 0) | (distance >= (sliding_window or end))
        scores.masked_fill_(is_hidden.to(query.device), float("-inf"))
        out[rows] = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values)
        lse[rows] = scores.logsumexp(-1).T
    return out, lse
