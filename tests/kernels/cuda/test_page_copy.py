"""Whole pages to buffers and back, bit for bit."""

import pytest
import torch

from kernels.cuda.page_copy import gather_pages, scatter_pages
from tests.triton_device import DEVICE, runs_kernels

pytestmark = runs_kernels


def random_pages(num_pages: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, NaN among them: copies may not read numbers."""
    size = (num_pages, 2, 2, *shape[:-1], shape[-1] * dtype.itemsize)
    bits = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return bits.view(dtype).to(DEVICE)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 128), (8, 6), (64, 96), (3, 2)])
def test_gathers_and_scatters_pages_bit_for_bit(dtype: torch.dtype, page_size: int, head_dim: int) -> None:
    kv_layer = random_pages(7, dtype, page_size, head_dim)
    pages = torch.tensor([5, 0, 6, 2], device=DEVICE)
    blocks = gather_pages(kv_layer, pages)
    assert blocks.is_contiguous()
    assert torch.equal(bits(blocks), bits(kv_layer[pages]))
    target = torch.zeros_like(kv_layer)
    scatter_pages(target, pages, blocks)
    assert torch.equal(bits(target[pages]), bits(blocks))
    assert not bits(target[[1, 3, 4]]).any()


def test_one_layer_of_a_buffer_of_whole_blocks() -> None:
    kv_layer = random_pages(5, torch.float16, 16, 64)
    pages = torch.tensor([4, 1, 3], device=DEVICE)
    buffer = torch.zeros((3, 2, *kv_layer.shape[1:]), dtype=torch.float16, device=DEVICE)
    gather_pages(kv_layer, pages, out=buffer[:, 1])
    assert torch.equal(bits(buffer[:, 1]), bits(kv_layer[pages]))
    assert not bits(buffer[:, 0]).any()
    target = torch.zeros_like(kv_layer)
    scatter_pages(target, pages, buffer[:, 1])
    assert torch.equal(bits(target[pages]), bits(kv_layer[pages]))


def test_no_pages_are_no_work() -> None:
    kv_layer = random_pages(5, torch.float16, 16, 64)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert gather_pages(kv_layer, nothing).shape == (0, *kv_layer.shape[1:])
    scatter_pages(kv_layer, nothing, kv_layer[:0])


def test_refuses_what_does_not_fit_together() -> None:
    kv_layer = random_pages(5, torch.float16, 16, 64)
    pages = torch.tensor([4, 1], device=DEVICE)
    with pytest.raises(ValueError, match="page numbers as int64"):
        gather_pages(kv_layer, pages.int())
    with pytest.raises(ValueError, match="expected blocks"):
        scatter_pages(kv_layer, pages, kv_layer[:3])
    with pytest.raises(ValueError, match="expected blocks as float16"):
        scatter_pages(kv_layer, pages, kv_layer[:2].float())
    with pytest.raises(ValueError, match="contiguous pages"):
        gather_pages(kv_layer[:, :, :, :8], pages)
