"""Products of a few rows against torch."""

import pytest
import torch

from kernels.cuda.skinny_linear import (
    MAX_GATED_ROWS,
    MAX_ROWS,
    LinearTile,
    Norm,
    default_tile,
    skinny_linear,
    skinny_linear_reference,
)
from tests.triton_device import DEVICE, IS_INTERPRETED, TOLERANCE, runs_kernels

pytestmark = runs_kernels

DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, MAX_ROWS])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize("tile", [None, default_tile(2, 6144)])
def test_equals_the_reference(
    dtype: torch.dtype, num_rows: int, is_gated: bool, has_all: bool, tile: LinearTile | None
) -> None:
    num_columns, num_terms = 80, 600
    x = random(num_rows, num_terms, dtype=dtype, seed=0)
    weight = random(num_columns * (2 if is_gated else 1), num_terms, dtype=dtype, seed=1) * num_terms**-0.5
    bias = residual = norm = None
    if has_all:
        bias = random(len(weight), dtype=dtype, seed=2)
        residual = random(num_rows, num_columns, dtype=dtype, seed=3)
        norm = Norm(random(num_terms, dtype=dtype, seed=4), 1e-5)
    out = skinny_linear(x, weight, bias, residual, norm=norm, is_gated=is_gated, tile=tile)
    expected = skinny_linear_reference(x, weight, bias, residual, norm=norm, is_gated=is_gated)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [17, MAX_GATED_ROWS])
def test_a_gated_product_takes_more_rows(dtype: torch.dtype, num_rows: int) -> None:
    x, weight = random(num_rows, 200, dtype=dtype, seed=0), random(160, 200, dtype=dtype, seed=1) * 200**-0.5
    out, expected = (f(x, weight, is_gated=True) for f in (skinny_linear, skinny_linear_reference))
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_refuses_what_does_not_fit_together() -> None:
    x, weight = (torch.zeros(n, 64, dtype=torch.float16, device=DEVICE) for n in (2, 32))
    with pytest.raises(ValueError, match=r"expected rows .* \[16, 64\], got .* \[17, 64\]"):
        skinny_linear(x[:1].repeat(17, 1), weight)
    with pytest.raises(ValueError, match="expected weights"):
        skinny_linear(x, weight[:, :32])
    with pytest.raises(ValueError, match="expected bias"):
        skinny_linear(x, weight, weight[0])
    with pytest.raises(ValueError, match="expected residual"):
        skinny_linear(x, weight, None, x)
    with pytest.raises(ValueError, match="expected the norm's weight"):
        skinny_linear(x, weight, norm=Norm(x[0, :32], 1e-5))
    with pytest.raises(ValueError, match="expected rows as bfloat16 or float16"):
        skinny_linear(x.float(), weight)
