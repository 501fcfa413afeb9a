"""Attention of chunks against attention written out plainly."""

import pytest
import torch

from kernels.cuda.prefill_attention import PrefillTile, default_tile, flops, prefill_attention
from kernels.cuda.spans import attention_reference
from tests.kernels.cuda.paged import Paged, paged
from tests.triton_device import DEVICE, DTYPES, TOLERANCE, runs_kernels

pytestmark = runs_kernels

# (new tokens, tokens in all): shorter than a tile, exactly one, whole prompts, later chunks, a single query.
SEQUENCES = ((2, 2), (16, 16), (40, 40), (33, 97), (5, 130), (1, 70), (33, 64))
TILE = PrefillTile(block_rows=32, block_keys=32, num_warps=4, num_stages=2)


def check(batch: Paged, window: int | None = None, tile: PrefillTile | None = None) -> None:
    out = torch.full(batch.query.shape, 7.0, dtype=batch.query.dtype, device=DEVICE)
    lse = torch.full(out.shape[:2], 7.0, device=DEVICE)
    prefill_attention(
        batch.query,
        batch.kv_layer,
        batch.prefill,
        batch.scale,
        out,
        sliding_window=window,
        lse=lse,
        tile=tile,
    )
    expected, expected_lse = attention_reference(
        batch.query, batch.kv_layer, batch.prefill, batch.scale, window
    )
    singles = batch.decode.table[:, 0]
    expected[singles], expected_lse[singles] = 7.0, 7.0
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size"), [(4, 128, 16), (3, 96, 8), (1, 64, 64), (7, 80, 48), (16, 32, 32)]
)
def test_equals_the_reference(dtype: torch.dtype, group: int, head_dim: int, page_size: int) -> None:
    tile_tokens = TILE.num_tokens(group)
    batch = paged(
        SEQUENCES,
        dtype=dtype,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        tile_tokens=tile_tokens,
    )
    check(batch, tile=TILE)


@pytest.mark.parametrize("window", [1, 9, 32, 50, 1000])
def test_a_window_hides_the_keys_before_it(window: int) -> None:
    tile_tokens = TILE.num_tokens(2)
    batch = paged(SEQUENCES, dtype=torch.float32, group=2, head_dim=64, page_size=16, tile_tokens=tile_tokens)
    check(batch, window, TILE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_the_default_tile_with_a_long_prefix(dtype: torch.dtype, window: int | None) -> None:
    tile_tokens = default_tile(dtype, 128).num_tokens(4)
    sequences = [(37, 1100), (1, 5)]
    batch = paged(sequences, dtype=dtype, group=4, head_dim=128, page_size=64, tile_tokens=tile_tokens)
    check(batch, window)


def test_refuses_more_heads_of_a_group_than_a_tile_has_rows() -> None:
    batch = paged([(3, 20)], dtype=torch.float32, group=40, head_dim=32, page_size=16, tile_tokens=1)
    out = torch.empty(batch.query.shape, device=DEVICE)
    with pytest.raises(ValueError, match="at most 32 query heads"):
        prefill_attention(batch.query, batch.kv_layer, batch.prefill, 1.0, out, tile=TILE)


def test_flops_count_the_keys_that_are_seen() -> None:
    # Three queries see 3, 4 and 5 keys, one sees 7: 4 FLOP for each element, of 2 heads of 10.
    assert flops([3, 1], [5, 7], num_heads=2, head_dim=10) == 4 * (3 + 4 + 5 + 7) * 2 * 10
