"""Norms and gates against torch."""

import pytest
import torch

from kernels.cuda import rms_norm as norms
from kernels.cuda import silu_mul as gates
from tests.triton_device import DEVICE, TOLERANCE, runs_kernels
from tests.triton_device import DTYPES as EXACT_DTYPES

pytestmark = runs_kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (3, 100), (5, 2048), (2, 5000), (0, 64)])
def test_rms_norm_equals_the_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    out, expected = norms.rms_norm(x, weight, 1e-5), norms.rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (3, 100), (2, 2048)])
def test_add_rms_norm_keeps_the_sum_and_returns_its_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight, added = random(shape[1], dtype=dtype, seed=2), x.clone()
    total = residual + x
    out = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(x, added)
    expected = norms.rms_norm_reference(total, weight, 1e-5)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_row_of_zeros_has_a_norm_of_zeros() -> None:
    x = torch.zeros(2, 64, device=DEVICE)
    assert not norms.rms_norm(x, torch.ones(64, device=DEVICE), 1e-6).any()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 200), (2, 4200), (0, 64)])
def test_silu_mul_equals_the_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = random(*shape, dtype=dtype) * 4
    out, expected = gates.silu_mul(gate_up), gates.silu_mul_reference(gate_up)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_refuses_what_does_not_fit_together() -> None:
    x = random(3, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match="expected weights"):
        norms.rms_norm(x, x[0].half(), 1e-5)
    with pytest.raises(ValueError, match="contiguous x"):
        norms.rms_norm(x[:, :32], x[0, :32], 1e-5)
    with pytest.raises(ValueError, match="expected residual"):
        norms.add_rms_norm(x, x[:2], x[0], 1e-5)
    with pytest.raises(ValueError, match="gates and values"):
        gates.silu_mul(x[:, :5].contiguous())


def test_bytes_moved_count_each_number_once() -> None:
    assert norms.bytes_moved(3, 100, 2, has_residual=True) == 3 * 100 * 2 * 4
    assert norms.bytes_moved(3, 100, 2, has_residual=False) == 3 * 100 * 2 * 2
    assert gates.bytes_moved(3, 100, 2) == 3 * 100 * 2 * 3
