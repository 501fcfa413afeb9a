"""Sequences whose keys and values are in pages out of order, for the tests of attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cuda.spans import SpanPlan, Spans, plan_spans
from tests.triton_device import DEVICE

NUM_KV_HEADS = 2


@dataclass(frozen=True, slots=True)
class Paged:
    """A batch in the form that the kernels take. `query` is a part of a larger matrix, as in the engine."""

    query: torch.Tensor
    kv_layer: torch.Tensor
    decode: Spans
    prefill: Spans

    @property
    def all(self) -> Spans:
        """The spans of the batch for the reference, which takes spans of any length."""
        return Spans(torch.cat((self.decode.table, self.prefill.table)), self.decode.pages)

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)


def plan(
    sequences: Sequence[tuple[int, int]], page_size: int, tile_tokens: int, seed: int = 0
) -> tuple[SpanPlan, int]:
    """Return the plan of a batch over pages in random order, and the number of pages.

    `sequences` has for each sequence the number of new tokens and of all tokens.
    """
    kv_lens = [kv_len for _, kv_len in sequences]
    num_used = [-(-kv_len // page_size) for kv_len in kv_lens]
    num_pages = sum(num_used) + 3
    shuffled = np.random.default_rng(seed).permutation(num_pages)
    # One page more than needed: a table may reach further than its sequence.
    tables = [shuffled[end - n : end + 1] for n, end in zip(num_used, np.cumsum(num_used), strict=True)]
    query_lens = [query_len for query_len, _ in sequences]
    return plan_spans(query_lens, kv_lens, tables, num_pages, page_size, tile_tokens), num_pages


def paged(
    sequences: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    page_size: int,
    tile_tokens: int,
) -> Paged:
    """Return a batch with random queries, keys and values.

    Page contents behind the last tokens, and pages that belong to no sequence, are NaN.
    """
    generator = torch.Generator().manual_seed(1)
    spans, num_pages = plan(sequences, page_size, tile_tokens)
    kv_layer = torch.full((num_pages, NUM_KV_HEADS, 2, page_size, head_dim), float("nan"))
    taken = 0
    for _, kv_len in sequences:
        for first in range(0, kv_len, page_size):
            page, num = spans.pages[taken], min(page_size, kv_len - first)
            kv_layer[page, :, :, :num] = torch.randn(NUM_KV_HEADS, 2, num, head_dim, generator=generator)
            taken += 1
    num_rows = sum(query_len for query_len, _ in sequences)
    qkv = torch.randn(num_rows, NUM_KV_HEADS * (group + 2), head_dim, generator=generator)
    pages = torch.from_numpy(spans.pages).to(DEVICE)
    return Paged(
        qkv.to(DEVICE, dtype)[:, : NUM_KV_HEADS * group],
        kv_layer.to(DEVICE, dtype),
        Spans(torch.from_numpy(spans.decode).to(DEVICE), pages),
        Spans(torch.from_numpy(spans.prefill).to(DEVICE), pages),
    )
