"""Attention of single queries against attention written out plainly."""

import numpy as np
import pytest
import torch

from kernels.cuda.decode_attention import (
    DecodeTile,
    decode_attention,
    pick_num_splits,
    pick_part_keys,
)
from kernels.cuda.spans import Spans, attention_reference
from tests.kernels.cuda.paged import Paged, paged
from tests.triton_device import DEVICE, DTYPES, TOLERANCE, runs_kernels

pytestmark = runs_kernels

# Tokens in all of each sequence: one, around the ends of pages and of blocks of 64 keys, and a long one.
KV_LENS = (1, 16, 17, 63, 64, 65, 300)


def check(batch: Paged, num_splits: int, window: int | None = None, tile: DecodeTile | None = None) -> None:
    out = torch.full(batch.query.shape, 7.0, dtype=batch.query.dtype, device=DEVICE)
    lse = torch.zeros(out.shape[:2], device=DEVICE)
    decode_attention(
        batch.query,
        batch.kv_layer,
        batch.decode,
        batch.scale,
        num_splits,
        out,
        sliding_window=window,
        lse=lse,
        tile=tile,
    )
    expected, expected_lse = attention_reference(
        batch.query, batch.kv_layer, batch.decode, batch.scale, window
    )
    rows = batch.decode.table[:, 0]
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out[rows].double(), expected[rows], rtol=0, atol=tolerance)
    torch.testing.assert_close(lse[rows].double(), expected_lse[rows], rtol=0, atol=tolerance)
    others = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
    others[rows] = False
    assert bool((out[others] == 7.0).all()), "rows of other sequences were written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size", "num_splits"),
    [(4, 128, 16, 4), (3, 96, 8, 1), (1, 64, 64, 2), (7, 80, 48, 8), (16, 32, 128, 2)],
)
def test_equals_the_reference(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int, num_splits: int
) -> None:
    sequences = [(1, kv_len) for kv_len in KV_LENS]
    batch = paged(sequences, dtype=dtype, group=group, head_dim=head_dim, page_size=page_size, tile_tokens=1)
    check(batch, num_splits)


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_window_hides_the_keys_before_it(window: int, num_splits: int) -> None:
    sequences = [(1, kv_len) for kv_len in KV_LENS]
    batch = paged(sequences, dtype=torch.float32, group=2, head_dim=64, page_size=16, tile_tokens=1)
    check(batch, num_splits, window)


def test_decode_beside_chunks_writes_its_own_rows_only() -> None:
    sequences = [(5, 30), (1, 40), (2, 2), (1, 1)]
    batch = paged(sequences, dtype=torch.float32, group=2, head_dim=64, page_size=16, tile_tokens=4)
    assert batch.decode.table[:, 0].tolist() == [5, 8]
    check(batch, num_splits=2)


def test_a_long_context_in_many_parts() -> None:
    batch = paged(
        [(1, 4133), (1, 3)], dtype=torch.float16, group=4, head_dim=128, page_size=64, tile_tokens=1
    )
    check(batch, num_splits=16)


def test_any_tile_computes_the_same() -> None:
    batch = paged([(1, 150), (1, 31)], dtype=torch.float16, group=4, head_dim=64, page_size=32, tile_tokens=1)
    for block_keys in (16, 32, 128):
        check(batch, 2, tile=DecodeTile(block_keys, 4, 2))


def test_a_span_of_no_tokens_gives_zeros() -> None:
    batch = paged([(1, 20), (1, 9)], dtype=torch.float32, group=2, head_dim=64, page_size=16, tile_tokens=1)
    table = batch.decode.table.clone()
    table[1, 1:] = 0
    out = torch.full(batch.query.shape, 7.0, device=DEVICE)
    lse = torch.zeros(out.shape[:2], device=DEVICE)
    spans = Spans(table, batch.decode.pages)
    decode_attention(batch.query, batch.kv_layer, spans, batch.scale, 4, out, lse=lse)
    expected, _ = attention_reference(batch.query, batch.kv_layer, spans, batch.scale)
    torch.testing.assert_close(out[0].double(), expected[0], rtol=0, atol=1e-5)
    assert not out[1].any()
    assert bool((lse[1] == float("-inf")).all())


def test_refuses_what_does_not_fit_together() -> None:
    batch = paged([(1, 20)], dtype=torch.float32, group=2, head_dim=64, page_size=16, tile_tokens=1)
    out = torch.empty(batch.query.shape, device=DEVICE)

    def call(
        query: torch.Tensor = batch.query,
        kv_layer: torch.Tensor = batch.kv_layer,
        out: torch.Tensor = out,
        num_splits: int = 1,
        window: int | None = None,
    ) -> None:
        decode_attention(query, kv_layer, batch.decode, 1.0, num_splits, out, sliding_window=window)

    with pytest.raises(ValueError, match="power of two"):
        call(num_splits=3)
    with pytest.raises(ValueError, match="sliding window of 0"):
        call(window=0)
    with pytest.raises(ValueError, match="expected queries as float32"):
        call(query=batch.query.half())
    with pytest.raises(ValueError, match="contiguous pages"):
        call(kv_layer=batch.kv_layer.transpose(0, 1))
    with pytest.raises(ValueError, match="KV heads divide"):
        call(query=batch.query[:, :3])
    with pytest.raises(ValueError, match="expected the result as float32"):
        call(out=out[:, :2])


@pytest.mark.parametrize("part_keys", [64, 192, 4160])
@pytest.mark.parametrize("window", [None, 150])
def test_spans_say_how_long_parts_are(part_keys: int, window: int | None) -> None:
    sequences = [(1, kv_len) for kv_len in (*KV_LENS, 700)]
    batch = paged(sequences, dtype=torch.float32, group=2, head_dim=64, page_size=16, tile_tokens=1)
    batch.decode.table[:, 4] = part_keys
    check(batch, 8, window)  # 700 keys are more than 8 parts of 64
    check(batch, 1, window)


def test_the_grid_has_room_for_splits_that_fill_the_device() -> None:
    assert pick_num_splits(num_queries=64, num_kv_heads=8, num_sms=132) == 4
    assert pick_num_splits(num_queries=10, num_kv_heads=8, num_sms=132) == 16
    assert pick_num_splits(num_queries=1, num_kv_heads=8, num_sms=132) == 64
    assert pick_num_splits(num_queries=1000, num_kv_heads=8, num_sms=132) == 1


@pytest.mark.parametrize(
    ("kv_lens", "expected"),
    [
        ([1025], 64),
        ([3], 64),
        ([1025] * 8, 192),
        ([1025] * 64, 1088),
        ([8192] * 64, 8192),
        # One that is much longer is cut, so that the others do not wait for it.
        ([1000] * 63 + [32768], 2048),
    ],
)
def test_parts_are_as_long_as_the_batch_lets_them(kv_lens: list[int], expected: int) -> None:
    assert pick_part_keys(np.array(kv_lens), num_kv_heads=8, num_sms=132) == expected
