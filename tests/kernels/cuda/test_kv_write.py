"""Rotation and page write against torch."""

import pytest
import torch

from kernels.cuda.kv_write import TokenSlots, rotate_and_write, rotate_and_write_reference
from kernels.head_norms import HeadNorms
from tests.triton_device import DEVICE, TOLERANCE, runs_kernels

pytestmark = runs_kernels

PAGE_SIZE = 8


def inputs(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, TokenSlots, HeadNorms]:
    """(qkv, pages full of 9, slots in any order with every fourth token nowhere, norms)."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    kv_layer = torch.full((num_tokens, num_kv_heads, 2, PAGE_SIZE, head_dim), 9.0, dtype=dtype)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator) * 6
    slots = torch.randperm(num_tokens * PAGE_SIZE, generator=generator)[:num_tokens]
    pages = slots // PAGE_SIZE
    pages[3::4] = -1
    norms = 1 + torch.rand(2, head_dim, generator=generator).to(dtype)
    return (
        qkv.to(DEVICE),
        kv_layer.to(DEVICE),
        TokenSlots(*(x.to(DEVICE) for x in (angles.cos(), angles.sin(), pages, slots % PAGE_SIZE))),
        HeadNorms(norms[0].to(DEVICE), norms[1].to(DEVICE), 1e-5),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (3, 3, 96), (7, 1, 64), (2, 1, 10)]
)
def test_equals_the_reference(
    dtype: torch.dtype, has_norms: bool, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    qkv, kv_layer, slots, norms = inputs(5, num_heads, num_kv_heads, head_dim, dtype)
    expected_qkv, expected_kv_layer = qkv.clone(), kv_layer.clone()
    values = qkv[:, num_heads + num_kv_heads :].clone()
    rotate_and_write(qkv, kv_layer, slots, norms if has_norms else None)
    rotate_and_write_reference(expected_qkv, expected_kv_layer, slots, norms if has_norms else None)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(qkv[:, :num_heads], expected_qkv[:, :num_heads], **tolerance)
    torch.testing.assert_close(kv_layer, expected_kv_layer, **tolerance)
    # Values are copied, not computed; untouched slots keep what they had.
    token = 1
    page, offset = slots.pages[token], slots.offsets[token]
    assert torch.equal(kv_layer[page, :, 1, offset], values[token])
    num_written = int((slots.pages >= 0).sum())
    assert int((kv_layer == 9.0).all(-1).sum()) == (5 * PAGE_SIZE - num_written) * 2 * num_kv_heads


def test_a_token_without_a_page_is_rotated_and_written_nowhere() -> None:
    qkv, kv_layer, slots, _ = inputs(4, 4, 2, 64, torch.float32)
    expected = qkv.clone()
    nowhere = TokenSlots(slots.cos, slots.sin, torch.full_like(slots.pages, -1), slots.offsets)
    rotate_and_write(qkv, kv_layer, nowhere)
    assert bool((kv_layer == 9.0).all())
    assert not torch.equal(qkv[:, :4], expected[:, :4])


def test_refuses_shapes_and_dtypes_that_do_not_fit() -> None:
    qkv, kv_layer, slots, norms = inputs(4, 4, 2, 64, torch.float32)
    with pytest.raises(ValueError, match="expected queries, keys and values"):
        rotate_and_write(qkv.half(), kv_layer, slots)
    with pytest.raises(ValueError, match="more than 4 heads"):
        rotate_and_write(qkv[:, :4].contiguous(), kv_layer, slots)
    with pytest.raises(ValueError, match="expected cos"):
        rotate_and_write(qkv[:3], kv_layer, slots)
    narrow = TokenSlots(slots.cos, slots.sin, slots.pages.int(), slots.offsets)
    with pytest.raises(ValueError, match="expected page numbers"):
        rotate_and_write(qkv, kv_layer, narrow)
    with pytest.raises(ValueError, match="expected key norm"):
        rotate_and_write(qkv, kv_layer, slots, HeadNorms(norms.query, norms.key[:10], 1e-5))
