"""Root-mean-square norm of rows, alone or after an addition to the residual.

Bytes moved: without the addition, 2 numbers an element; with it, 4 numbers (`x` and the residual read, the
sum and the norm written). Separate kernels for addition and norm would move 5. The weight comes from the
cache.

Owns: the reference, the kernel, its launch. Does not know: layers.
"""

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import FLOATS, check_tensor, launch

_MAX_COLUMNS = 1 << 16


def bytes_moved(num_rows: int, num_columns: int, item_bytes: int, *, has_residual: bool) -> int:
    """Return the bytes moved: x and the norm, and with a residual also the residual and the sum."""
    return (4 if has_residual else 2) * num_rows * num_columns * item_bytes


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return each row divided by its root mean square, times `weight`; computed in float32, rounded once.

    `eps` is added to the mean square.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@triton.jit
def _rms_norm(
    x, residual, weight, out, eps, NUM_COLUMNS: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    """Compute the norm of one row. With a residual, the sum is rounded and written first."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < NUM_COLUMNS
    at = row * NUM_COLUMNS + column
    values = tl.load(x + at, mask=is_column, other=0.0)
    if HAS_RESIDUAL:
        kept = tl.load(residual + at, mask=is_column, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + kept).to(values.dtype)
        tl.store(residual + at, values, mask=is_column)
    wide = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / NUM_COLUMNS + eps)
    normed = wide * factor * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(values.dtype), mask=is_column)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` of each row of contiguous `x` [T, n]; `weight` is `[n]`.

    `x` and `weight` are float32, bfloat16 or float16. Raises ValueError for other tensors, and for n above
    65536.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to `residual` in place, and return the norm of the sum.

    `x` and `residual` are contiguous `[T, n]` of one dtype, `weight` is `[n]`. Raises ValueError as
    `rms_norm` does.
    """
    check_tensor("residual", residual, x.shape, [x.dtype], x)
    return _launch(x, residual, weight, eps)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, num_columns = x.shape
    check_tensor("x", x, x.shape, FLOATS, x)
    check_tensor("weights", weight, (num_columns,), [x.dtype], x)
    if num_columns > _MAX_COLUMNS:
        raise ValueError(f"expected rows of at most {_MAX_COLUMNS} elements, got {num_columns}")
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(num_columns)
    launch(
        _rms_norm, (num_rows,),
        x, x if residual is None else residual, weight, out, eps,
        NUM_COLUMNS=num_columns, BLOCK=block, HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
