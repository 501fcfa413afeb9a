"""Products with packed weights against torch's, on every instruction set."""

import pytest
import torch
from torch.nn.functional import silu

from kernels.cpu.library import Isa
from kernels.cpu.linear import GatedLinear, PackedLinear
from tests.kernels.cpu.isas import DTYPES, SUPPORTED, library_of, on_every_isa, random

NUMBERS_OF_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 34, 64, 65, 128, 129, 300)
"""One thread multiplies up to 128 rows with a panel; a product of 300 has blocks of 128, 128 and 44."""


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (50, 34), (7, 130), (200, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_equals_torch_and_no_row_depends_on_the_others(
    isa: Isa, dtype: torch.dtype, out_features: int, in_features: int, with_bias: bool, with_residual: bool
) -> None:
    weight = random((out_features, in_features), dtype)
    bias = random((out_features,), dtype, 1) if with_bias else None
    linear = PackedLinear(library_of(isa), weight, bias)
    x, residual = random((300, in_features), dtype, 2), random((300, out_features), dtype, 3)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias
    if with_residual:
        expected += residual
    whole = linear(x, residual if with_residual else None, torch.float32)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4)
    rounded = linear(x, residual if with_residual else None)
    assert torch.equal(rounded, whole.to(dtype))
    for num_rows in NUMBERS_OF_ROWS:
        part = residual[:num_rows] if with_residual else None
        assert torch.equal(linear(x[:num_rows], part, torch.float32), whole[:num_rows])


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_to_the_nearest_as_torch_does(isa: Isa, dtype: torch.dtype) -> None:
    values = torch.cat(
        (random((500,), torch.float32), torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-30]))
    )
    identity = PackedLinear(library_of(isa), torch.eye(2, dtype=dtype))
    x = torch.stack((values.to(dtype), torch.zeros(len(values), dtype=dtype)), dim=1).nan_to_num(posinf=3e38)
    residual = torch.stack((values.to(dtype), torch.full((len(values),), 2**-9, dtype=dtype)), dim=1)
    expected = (x.float() + residual.float()).to(dtype)
    torch.testing.assert_close(identity(x, residual), expected, rtol=0, atol=0, equal_nan=True)


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_those_of_the_matrix(isa: Isa, dtype: torch.dtype) -> None:
    weight = random((101, 70), dtype)
    linear = PackedLinear(library_of(isa), weight)
    ids = torch.tensor([100, 0, 47, 48, 100, 15, 16])
    assert torch.equal(linear.rows(ids), weight[ids])
    assert linear.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 70)
    for wrong in (101, -1):
        with pytest.raises(IndexError, match=r"expected ids in \[0, 101\)"):
            linear.rows(torch.tensor([3, wrong]))


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_features", [48, 96, 50, 7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_gated_products_equal_torch(
    isa: Isa, dtype: torch.dtype, out_features: int, with_bias: bool, scale: float
) -> None:
    library = library_of(isa)
    weights = [scale * random((out_features, 64), dtype, seed) for seed in (1, 2)]
    biases = [random((out_features,), dtype, seed) if with_bias else None for seed in (3, 4)]
    packed = [PackedLinear(library, w, b) for w, b in zip(weights, biases, strict=True)]
    x = random((300, 64), dtype)
    gate, up = (
        x.double() @ w.double().T + (0 if b is None else b) for w, b in zip(weights, biases, strict=True)
    )
    whole = GatedLinear(library, *packed)(x)
    expected = silu(gate) * up
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    atol = tolerance * float(expected.abs().max()) / 10
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=atol)
    for num_rows in NUMBERS_OF_ROWS:
        assert torch.equal(GatedLinear(library, *packed)(x[:num_rows]), whole[:num_rows])


class TestRefuses:
    library = library_of(SUPPORTED[0])

    @pytest.mark.parametrize(
        ("weight", "message"),
        [
            (torch.zeros(4, 3), "even number of columns"),
            (torch.zeros(4, 6).half(), "expected one of"),
            (torch.zeros(6, 4).T, "contiguous"),
        ],
    )
    def test_weights(self, weight: torch.Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PackedLinear(self.library, weight)

    def test_gates_that_are_not_like_the_ups(self) -> None:
        with pytest.raises(ValueError, match="expected gates like ups"):
            GatedLinear(self.library, *(PackedLinear(self.library, torch.zeros(n, 6)) for n in (4, 5)))

    def test_a_bias_of_another_length(self) -> None:
        with pytest.raises(ValueError, match=r"expected bias as contiguous torch.float32 \[4\]"):
            PackedLinear(self.library, torch.zeros(4, 6), torch.zeros(5))

    @pytest.mark.parametrize(
        ("x", "residual", "out_dtype"),
        [
            (torch.zeros(2, 5), None, None),
            (torch.zeros(2, 6).bfloat16(), None, None),
            (torch.zeros(6, 2).T, None, None),
            (torch.zeros(2, 6), torch.zeros(3, 4), None),
            (torch.zeros(2, 6), None, torch.bfloat16),
        ],
    )
    def test_tensors(
        self, x: torch.Tensor, residual: torch.Tensor | None, out_dtype: torch.dtype | None
    ) -> None:
        with pytest.raises(ValueError, match="expected"):
            PackedLinear(self.library, torch.zeros(4, 6))(x, residual, out_dtype)
