"""Attention of chunks against attention written out plainly."""

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels.cuda import prefill_attention as prefill
from kernels.cuda.prefill_attention import (
    PrefillTile,
    default_tile,
    flops,
    hopper_kernel,
    prefill_attention,
)
from kernels.cuda.spans import attention_reference
from tests.kernels.cuda.paged import Paged, paged
from tests.triton_device import DEVICE, DTYPES, TOLERANCE, runs_kernels

pytestmark = runs_kernels

# (new tokens, tokens in all): shorter than a tile, exactly one, whole prompts, later chunks, a single query.
SEQUENCES = ((2, 2), (16, 16), (40, 40), (33, 97), (5, 130), (1, 70), (33, 64))
# Long ones too: each stage of the ring is used many times, from both warpgroups.
LONG_SEQUENCES = (*SEQUENCES, (64, 64), (129, 129), (300, 300), (65, 700), (130, 4097), (700, 5000))
TILE = PrefillTile(block_rows=32, block_keys=32, num_warps=4, num_stages=2)


@pytest.fixture
def forgotten_choice() -> Iterator[None]:
    hopper_kernel.cache_clear()
    yield
    hopper_kernel.cache_clear()


def check(batch: Paged, window: int | None = None, tile: PrefillTile | None = None) -> torch.Tensor:
    """Compare all rows, also those that stay as they were; return the result."""
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
    return out


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


@pytest.mark.skipif(hopper_kernel(DEVICE) is None, reason="for Hopper's SMs, and nothing interprets Gluon")
@pytest.mark.parametrize("window", [None, 1, 9, 64, 100, 1000], ids="window {}".format)
@pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "page_size"),
    [
        (torch.bfloat16, 4, 128, 64),
        (torch.bfloat16, 7, 64, 64),
        (torch.float16, 1, 128, 128),
        (torch.float16, 3, 64, 192),
        (torch.bfloat16, 8, 128, 256),
    ],
    ids=str,
)
def test_hoppers_kernel_equals_the_reference(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int, window: int | None
) -> None:
    batch = paged(
        LONG_SEQUENCES,
        dtype=dtype,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        tile_tokens=default_tile(dtype, head_dim).num_tokens(group),
    )
    kernel = hopper_kernel(DEVICE)
    assert kernel is not None
    assert kernel.is_for(batch.query, batch.kv_layer)
    result = check(batch, window)
    # As layers call it, without the sums; again and again, since a race need not show at once.
    for _ in range(5):
        again = torch.full_like(result, 7.0)
        prefill_attention(
            batch.query, batch.kv_layer, batch.prefill, batch.scale, again, sliding_window=window
        )
        assert torch.equal(again, result)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "expected"),
    [
        (torch.bfloat16, 128, 64, True),
        (torch.float16, 64, 128, True),
        (torch.float32, 128, 64, False),
        (torch.bfloat16, 96, 64, False),
        (torch.bfloat16, 128, 16, False),
        (torch.bfloat16, 128, 96, False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("forgotten_choice")
def test_hoppers_kernel_is_for_16_bit_heads_of_64_and_128_in_pages_of_whole_blocks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, page_size: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel = hopper_kernel(torch.device("cuda:0"))
    assert kernel is not None
    kv_layer = torch.empty(1, 2, 2, page_size, head_dim, dtype=dtype)
    assert kernel.is_for(torch.empty(1, 8, head_dim, dtype=dtype), kv_layer) is expected


@pytest.mark.usefixtures("forgotten_choice")
def test_a_triton_without_what_hoppers_kernel_needs_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "kernels.cuda.hopper_prefill", None)
    monkeypatch.delattr("kernels.cuda.hopper_prefill", raising=False)
    with caplog.at_level(logging.WARNING, prefill.__name__):
        assert hopper_kernel(torch.device("cuda:0")) is None
        assert hopper_kernel(torch.device("cuda:0")) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "hopper_prefill" in caplog.text


@pytest.mark.usefixtures("forgotten_choice")
def test_other_devices_have_the_kernel_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hopper_kernel(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert hopper_kernel(torch.device("cuda:0")) is None
