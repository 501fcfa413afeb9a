"""Paged attention against attention written out plainly, in float32 and bfloat16."""

import pytest
import torch

from kernels.attention import PageGeometry, paged_attention, plan_attention
from kernels.kv_copy import write_kv

NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
NUM_HEADS = NUM_KV_HEADS * GROUP
SCALE = HEAD_DIM**-0.5


def naive_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """[n, heads, d] queries at the end of a sequence of [kv_len, kv_heads, d] keys and values, in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    keys, values = (x.repeat_interleave(GROUP, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * SCALE
    query_at = torch.arange(len(keys) - len(query), len(keys))[:, None]
    key_at = torch.arange(len(keys))[None]
    is_seen = key_at <= query_at
    if window is not None:
        is_seen &= key_at > query_at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, float("-inf")).softmax(-1), values)


# (new tokens, tokens in all) of each sequence
BATCHES = {
    "decode, lengths far apart": [(1, 3), (1, 700), (1, 90), (1, 1), (1, 310), (1, 650)],
    "one decode": [(1, 37)],
    "first chunk of several blocks": [(300, 300)],
    "later chunk, not page-aligned": [(150, 333)],
    "mixed": [(1, 20), (40, 40), (1, 500), (17, 203), (1, 9), (130, 400)],
}


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("window", [None, 1, 24, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [8, 16])
def test_equals_naive_attention(
    sequences: list[tuple[int, int]], window: int | None, dtype: torch.dtype, page_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_pages = sum(-(-kv_len // page_size) for _, kv_len in sequences)
    shuffled = torch.randperm(num_pages + 3, generator=generator)
    # Pages of nobody hold values that would show.
    kv_layer = torch.full((num_pages + 3, NUM_KV_HEADS, 2, page_size, HEAD_DIM), 1000.0, dtype=dtype)
    tables: list[torch.Tensor] = []
    queries, expected = [], []
    taken = 0
    for query_len, kv_len in sequences:
        table = shuffled[taken : taken + -(-kv_len // page_size)]
        taken += len(table)
        tables.append(table)
        keys, values = random(kv_len, NUM_KV_HEADS, HEAD_DIM), random(kv_len, NUM_KV_HEADS, HEAD_DIM)
        token = torch.arange(kv_len)
        write_kv(kv_layer, keys, values, table[token // page_size], token % page_size)
        queries.append(random(query_len, NUM_HEADS, HEAD_DIM))
        expected.append(naive_attention(queries[-1], keys, values, window))
    geometry = PageGeometry(NUM_KV_HEADS, page_size, dtype, torch.device("cpu"))
    plan = plan_attention([q for q, _ in sequences], [n for _, n in sequences], tables, geometry, window)
    out = paged_attention(torch.cat(queries), kv_layer, plan, SCALE)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0, atol=tolerance)


def test_a_window_gathers_only_the_pages_that_it_reaches() -> None:
    geometry = PageGeometry(1, 16, torch.float32, torch.device("cpu"))
    table = torch.arange(64)
    plan = plan_attention([1, 4], [1000, 1000], [table, table], geometry, sliding_window=20)
    # Token 999 sees keys from 980 on, which is in page 61; the chunk's first token, 996, sees from 977.
    assert plan.decodes[0].page_rows.tolist() == [122, 124, 123, 125]
    assert plan.prefills[0].page_rows.tolist() == [122, 124, 123, 125]


def test_decode_queries_are_grouped_so_that_padding_at_most_doubles_the_keys() -> None:
    geometry = PageGeometry(1, 16, torch.float32, torch.device("cpu"))
    lens = [4000, 20, 3000, 250, 90, 1900]
    tables = [torch.arange(256) for _ in lens]
    plan = plan_attention([1] * len(lens), lens, tables, geometry, None)
    assert [(group.rows.tolist(), group.num_keys) for group in plan.decodes] == [
        ([0, 2], 4000),
        ([5], 1900),
        ([1, 3, 4], 250),
    ]
