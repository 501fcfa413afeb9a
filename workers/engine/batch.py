"""One forward pass: the chunks of several sequences, concatenated without padding.

Owns: what all layers of a pass share (token ids, positions, pages to write, rotary factors, attention
plans), computed once. Does not know: why the scheduler chose these chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import AttentionPlan, PageGeometry, plan_attention
from workers.engine.kvcache import DeviceKVCache
from workers.engine.rotary import cos_sin


@dataclass(slots=True)
class Chunk:
    """Consecutive new tokens of one sequence: a part of its prompt, or the one token to decode from.

    Tokens `[0, start)` are in the cache already. `pages` holds the whole sequence in order: token t lies in
    `pages[t // page_size]`. Invariant: `pages` reach up to `start + len(token_ids)`; more are ignored.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """What the layers read, on the device of the cache. T tokens in all, S chunks."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    page_of_token: torch.Tensor  # int64 [T], where the token's KV is written
    offset_of_token: torch.Tensor  # int64 [T]
    last_rows: torch.Tensor  # int64 [S], the row of each chunk's last token
    cos: torch.Tensor  # [T, 1, head_dim], in the cache's dtype
    sin: torch.Tensor  # as cos, first half negated
    query_lens: tuple[int, ...]  # new tokens of each chunk
    kv_lens: tuple[int, ...]  # tokens of each sequence, the new ones included
    plans: dict[int | None, AttentionPlan]  # by sliding window

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @classmethod
    def build(cls, chunks: Sequence[Chunk], kv: DeviceKVCache) -> "Batch":
        """Prepares `chunks` (prefill and decode may be mixed) for the pages of `kv`.

        Raises ValueError for no chunk, an empty one, pages that do not reach its end, a position too high.
        """
        if not chunks:
            raise ValueError("a batch needs at least one chunk")
        for chunk in chunks:
            _check(chunk, kv)
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        kv_lens = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        page_tables = [np.asarray(chunk.pages, dtype=np.int64) for chunk in chunks]
        positions = np.concatenate([np.arange(c.start, end) for c, end in zip(chunks, kv_lens, strict=True)])
        page_of_token = np.concatenate(
            [
                pages[np.arange(c.start, end) // kv.page_size]
                for c, end, pages in zip(chunks, kv_lens, page_tables, strict=True)
            ]
        )
        token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
        device_positions = torch.from_numpy(positions).to(kv.device)
        cos, sin = cos_sin(kv.spec, device_positions, kv.dtype)
        tables = [torch.from_numpy(pages) for pages in page_tables]
        geometry = PageGeometry(kv.spec.num_kv_heads, kv.page_size, kv.dtype, kv.device)
        windows = {kv.spec.layer_sliding_window(layer) for layer in kv.layers}
        return cls(
            token_ids=torch.from_numpy(token_ids).to(kv.device),
            positions=device_positions,
            page_of_token=torch.from_numpy(page_of_token).to(kv.device),
            offset_of_token=device_positions % kv.page_size,
            last_rows=torch.from_numpy(np.cumsum(query_lens) - 1).to(kv.device),
            cos=cos,
            sin=sin,
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            plans={w: plan_attention(query_lens, kv_lens, tables, geometry, w) for w in windows},
        )


def _check(chunk: Chunk, kv: DeviceKVCache) -> None:
    end = chunk.start + len(chunk.token_ids)
    if len(chunk.token_ids) == 0:
        raise ValueError("a chunk needs at least one token")
    if end > len(chunk.pages) * kv.page_size:
        raise ValueError(
            f"a chunk that ends at token {end} needs {-(-end // kv.page_size)} pages "
            f"of {kv.page_size} tokens, got {len(chunk.pages)}"
        )
    if end > kv.spec.max_position:
        raise ValueError(f"a chunk ends at token {end}, the model has {kv.spec.max_position} positions")
