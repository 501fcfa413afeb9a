"""Quantised pages: equal to torch's, within the bounds of error, and what is special about a scale."""

import pytest
import torch

from kernels.cuda.kv_quantise import (
    Encoding,
    bytes_moved,
    dequantise_pages,
    dequantise_reference,
    quantise_pages,
    quantise_reference,
)
from tests.triton_device import DEVICE, runs_kernels

pytestmark = runs_kernels

EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""relative error of rounding to a dtype"""


def random_pages(dtype: torch.dtype, page_size: int = 16, head_dim: int = 64) -> torch.Tensor:
    """Magnitudes of each part far apart, many elements far below the largest of their part."""
    generator = torch.Generator().manual_seed(0)
    shape = (6, 3, 2, page_size, head_dim)
    parts = 10.0 ** (torch.rand(shape[:3], generator=generator) * 4 - 3)
    small = torch.rand(shape, generator=generator) ** 6
    return (torch.randn(shape, generator=generator) * small * parts[..., None, None]).to(DEVICE, dtype)


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (8, 96), (64, 128), (3, 10)])
def test_equals_the_reference(encoding: Encoding, dtype: torch.dtype, page_size: int, head_dim: int) -> None:
    kv_layer = random_pages(dtype, page_size, head_dim)
    pages = torch.tensor([5, 0, 3], device=DEVICE)
    numbers, scales = quantise_pages(kv_layer, pages, encoding)
    expected, expected_scales = quantise_reference(kv_layer, pages, encoding)
    assert numbers.dtype is encoding.dtype
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # A GPU's quotient may differ in its last bit, and then a tie is rounded the other way.
    difference = (numbers.view(torch.int8).int() - expected.view(torch.int8).int()).abs()
    assert int(difference.max()) <= 1
    assert int(difference.count_nonzero()) <= difference.numel() // 1000
    out, expected_out = torch.zeros_like(kv_layer), torch.zeros_like(kv_layer)
    dequantise_pages(out, pages, numbers, scales)
    dequantise_reference(expected_out, pages, numbers, scales)
    torch.testing.assert_close(out, expected_out, rtol=2 * EPSILON[dtype], atol=0)
    assert not out[[1, 2, 4]].any()


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_error_keeps_its_bound(encoding: Encoding, dtype: torch.dtype) -> None:
    kv_layer = random_pages(dtype)
    pages = torch.arange(6, device=DEVICE)
    numbers, scales = quantise_pages(kv_layer, pages, encoding)
    out = torch.zeros_like(kv_layer)
    dequantise_pages(out, pages, numbers, scales)
    exact, scale = kv_layer.double(), scales.double()[..., None, None]
    if encoding is Encoding.INT8:
        bound = (scale / 2).expand_as(exact)
    else:
        bound = torch.maximum(exact.abs() / 16, scale / 1024)
    # The result has been rounded to its dtype, and the scale was.
    slack = 2 * EPSILON[dtype] * exact.abs() + 1e-6 * scale * encoding.value
    slack += 2.0**-24 if dtype is torch.float16 else 0.0  # its least number
    assert bool(((out.double() - exact).abs() <= bound + slack).all())


@pytest.mark.parametrize("encoding", Encoding)
def test_every_part_has_a_scale_of_its_own_and_its_largest_element_comes_back(encoding: Encoding) -> None:
    kv_layer = random_pages(torch.float32)
    pages = torch.arange(6, device=DEVICE)
    numbers, scales = quantise_pages(kv_layer, pages, encoding)
    largest = kv_layer.abs().amax((-2, -1))
    torch.testing.assert_close(scales * encoding.value, largest)
    assert bool((numbers.float().abs().amax((-2, -1)) == encoding.value).all())


@pytest.mark.parametrize("encoding", Encoding)
def test_zeros_come_back_as_zeros(encoding: Encoding) -> None:
    kv_layer = torch.zeros(2, 1, 2, 4, 8, device=DEVICE)
    pages = torch.arange(2, device=DEVICE)
    numbers, scales = quantise_pages(kv_layer, pages, encoding)
    out = torch.ones_like(kv_layer)
    dequantise_pages(out, pages, numbers, scales)
    assert not out.any()


def test_every_e4m3_number_is_read_and_made_as_torch_does() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[~every.float().isnan()].to(DEVICE)  # 254 numbers, -0 among them
    numbers = torch.cat((every, every[:2])).view(1, 1, 2, 8, 16)
    pages = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    kv_layer = torch.zeros(1, 1, 2, 8, 16, device=DEVICE)
    dequantise_pages(kv_layer, pages, numbers, torch.ones(1, 1, 2, device=DEVICE))
    assert torch.equal(kv_layer, numbers.float())
    # Each half has the largest number 448, or -448, so its scale is 1.
    again, scales = quantise_pages(kv_layer, pages, Encoding.E4M3)
    assert scales.tolist() == [[[1.0, 1.0]]]
    assert torch.equal(again.view(torch.uint8), numbers.view(torch.uint8))


def test_refuses_numbers_of_another_encoding() -> None:
    kv_layer = torch.zeros(2, 1, 2, 4, 8, device=DEVICE)
    pages = torch.arange(2, device=DEVICE)
    numbers, scales = quantise_pages(kv_layer, pages, Encoding.INT8)
    with pytest.raises(ValueError, match="numbers as int8 or float8_e4m3fn"):
        dequantise_pages(kv_layer, pages, numbers.view(torch.uint8), scales)
    with pytest.raises(ValueError, match="expected scales"):
        dequantise_pages(kv_layer, pages, numbers, scales[:1])


def test_bytes_moved_halve_those_of_a_transfer() -> None:
    assert bytes_moved(1, 8, 16, 128, item_bytes=2) == 8 * 2 * (16 * 128 * 3 + 4)
