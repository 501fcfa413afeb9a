"""How a batch is cut into spans, and what is refused."""

import numpy as np
import pytest
import torch

from kernels.attention import PageGeometry, paged_attention, plan_attention
from kernels.cuda.spans import SPAN_FIELDS, Spans, attention_reference, plan_spans
from tests.kernels.cuda.paged import NUM_KV_HEADS

TABLES = [np.array([5, 2, 7]), np.array([1]), np.array([3, 0, 6])]


def test_single_queries_and_tiles_of_chunks_name_rows_positions_and_pages() -> None:
    plan = plan_spans([1, 2, 10], [20, 8, 23], TABLES, num_pages=8, page_size=8, tile_tokens=4)
    assert plan.pages.tolist() == [5, 2, 7, 1, 3, 0, 6]
    assert plan.decode.tolist() == [[0, 1, 19, 0, 0]]
    # The chunk of 10 begins at position 13; tiles with the most keys go first.
    assert plan.prefill.tolist() == [
        [11, 2, 21, 4, 0],
        [7, 4, 17, 4, 0],
        [3, 4, 13, 4, 0],
        [1, 2, 6, 3, 0],
    ]


def test_a_batch_without_chunks_has_no_tiles_and_one_without_single_queries_no_decode_spans() -> None:
    assert plan_spans([1], [1], TABLES[:1], 8, 8, 4).prefill.shape == (0, SPAN_FIELDS)
    assert plan_spans([2], [2], TABLES[:1], 8, 8, 4).decode.shape == (0, SPAN_FIELDS)


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "tables", "message"),
    [
        ([1], [25], TABLES[:1], "room in the pages of 8, got .1., .25. and .3. pages"),
        ([0], [3], TABLES[:1], "1 <= new tokens"),
        ([4], [3], TABLES[:1], "1 <= new tokens"),
        ([1, 1], [3], TABLES[:1], "as many lengths"),
        ([1], [3], [np.array([8])], r"pages in \[0, 8\), got 8 to 8"),
        ([1], [3], [np.array([-1])], r"pages in \[0, 8\), got -1 to -1"),
    ],
)
def test_refuses_what_does_not_fit_together(
    query_lens: list[int], kv_lens: list[int], tables: list[np.ndarray], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_spans(query_lens, kv_lens, tables, num_pages=8, page_size=8, tile_tokens=4)


@pytest.mark.parametrize("window", [None, 5])
def test_the_reference_equals_the_cpus(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query_lens, kv_lens = [1, 7, 1], [20, 8, 24]
    plan = plan_spans(query_lens, kv_lens, TABLES, num_pages=8, page_size=8, tile_tokens=4)
    kv_layer = torch.randn(8, NUM_KV_HEADS, 2, 8, 16, generator=generator)
    query = torch.randn(9, NUM_KV_HEADS * 3, 16, generator=generator)
    geometry = PageGeometry(NUM_KV_HEADS, 8, torch.float32, torch.device("cpu"))
    tables = [torch.from_numpy(table) for table in TABLES]
    expected = paged_attention(
        query, kv_layer, plan_attention(query_lens, kv_lens, tables, geometry, window), 0.25
    )
    table = torch.from_numpy(np.concatenate((plan.decode, plan.prefill)))
    out, _ = attention_reference(query, kv_layer, Spans(table, torch.from_numpy(plan.pages)), 0.25, window)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=1e-5)
