"""Products of a few rows with a large matrix, which read each weight once at the memory's speed.

The operations around a product are fused: the bias, the residual, the gate of an MLP. With a single row, the
root-mean-square norm before the product is fused too. A single row is multiplied element by element, several
rows by the instructions for matrix products.

Bytes moved: the weights; the rows are small beside them, and come from the cache.

Owns: the reference, the kernel, its launch. Does not know: layers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import check_tensor, launch
from kernels.cuda.rms_norm import rms_norm, rms_norm_reference

MAX_ROWS = 16
"""The most rows of a product: as many as one matrix instruction has. With more rows cuBLAS is as fast."""
MAX_GATED_ROWS = 64
"""The most rows of a gated product: more than `MAX_ROWS`, as a fused gate saves a pass over memory."""
DTYPES = (torch.bfloat16, torch.float16)
_SHARED_BYTES = 160 << 10
"""Bytes of shared memory that a GPU must have for a program.

Tiles take 144 KiB of an A100's 163, and 192 of Hopper's 227. Consumer GPUs, L4 and L40 have 99.
"""


class Norm(NamedTuple):
    """A root-mean-square norm of rows `[T, n]`: its weight `[n]`, and the `eps` added to the mean square."""

    weight: torch.Tensor
    eps: float


class LinearTile(NamedTuple):
    """The shape and launch parameters of the kernel.

    They are: columns of the result and summed terms of one step, warps, steps in flight.
    """

    block_columns: int
    block_terms: int
    num_warps: int
    num_stages: int


def default_tile(num_rows: int, num_columns: int, *, is_plain: bool = True) -> LinearTile:
    """Return the fastest tile on a Hopper GPU.

    `is_plain`: the product has neither a norm before it nor a gate after it. With a single row, norm and gate
    take registers.
    """
    if num_rows == 1:
        return LinearTile(2, 2048, 4 if is_plain else 8, 1)
    is_narrow = num_columns <= 4096 and num_rows <= MAX_ROWS
    return LinearTile(16, 512, 2, 3) if is_narrow else LinearTile(64, 128, 4, 4)


def has_room(device: torch.device) -> bool:
    """Return whether programs fit into the device's shared memory, as Triton launches no larger programs."""
    if device.type != "cuda":
        return True  # interpreted
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return bool(properties["max_shared_mem"] >= _SHARED_BYTES)


def block_rows(num_rows: int) -> int:
    """Return the number of rows for which the kernel is compiled, at least `num_rows`."""
    return 1 if num_rows == 1 else max(MAX_ROWS, int(triton.next_power_of_2(num_rows)))


def bytes_moved(weight: torch.Tensor) -> int:
    """Return the bytes moved: the weights, read once."""
    return weight.numel() * weight.element_size()


def skinny_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """Return the kernel's result, computed in torch and float32; the norm and the result are rounded."""
    out = (x if norm is None else rms_norm_reference(x, *norm)).float() @ weight.float().t()
    if bias is not None:
        out += bias.float()
    if is_gated:
        gate, up = out.chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate) * up
    if residual is not None:
        out += residual.float()
    return out.to(x.dtype)


@triton.jit
def _load(at, mask):
    values = tl.load(at) if mask is None else tl.load(at, mask=mask, other=0.0)
    return values  # noqa: RET504 - Triton compiles no conditional expression that is returned


@triton.jit
def _load_once(at, mask):
    """Load data that no other program reads, and that need not stay in the cache."""
    if mask is None:
        values = tl.load(at, eviction_policy="evict_first")
    else:
        values = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return values


# Not specialised: else the kernel of each matrix would be compiled for twice as many numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def _skinny_linear(
    x, weight, bias, residual, norm, out, num_rows, eps,
    NUM_COLUMNS: tl.constexpr, NUM_TERMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_TERMS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
):  # fmt: skip
    """Compute some columns of the result, of all rows.

    The weights are the left side of the product, as an instruction takes more rows of the left side than
    columns of the right one.
    """
    column = (tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[:, None]
    row = tl.arange(0, BLOCK_ROWS)[None, :]
    term = tl.arange(0, BLOCK_TERMS)
    is_column, is_row = column < NUM_COLUMNS, row < num_rows
    # Masks cost registers and instructions: none where blocks divide the matrix.
    IS_EVEN: tl.constexpr = NUM_TERMS % BLOCK_TERMS == 0 and NUM_COLUMNS % BLOCK_COLUMNS == 0
    weights = weight + column.to(tl.int64) * NUM_TERMS + term[None, :]
    up_weights = weights + NUM_COLUMNS * NUM_TERMS
    if BLOCK_ROWS == 1:
        # Sums by lane, which are added up at the end.
        sums = tl.zeros([BLOCK_COLUMNS, BLOCK_TERMS], tl.float32)
        up_sums = tl.zeros([BLOCK_COLUMNS, BLOCK_TERMS], tl.float32)
        squares = tl.zeros([BLOCK_TERMS], tl.float32)
        for begin in range(0, NUM_TERMS, BLOCK_TERMS):
            is_term = None if IS_EVEN else term < NUM_TERMS - begin
            mask = None if IS_EVEN else is_column & (term[None, :] < NUM_TERMS - begin)
            values = _load(x + begin + term, is_term).to(tl.float32)
            if HAS_NORM:
                squares += values * values
                values *= _load(norm + begin + term, is_term).to(tl.float32)
            sums += values[None, :] * _load_once(weights + begin, mask).to(tl.float32)
            if IS_GATED:
                up_sums += values[None, :] * _load_once(up_weights + begin, mask).to(tl.float32)
        factor = tl.rsqrt(tl.sum(squares, 0) / NUM_TERMS + eps) if HAS_NORM else 1.0
        result = tl.sum(sums, 1)[:, None] * factor
        up = tl.sum(up_sums, 1)[:, None] * factor
    else:
        result = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], tl.float32)
        up = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], tl.float32)
        for begin in range(0, NUM_TERMS, BLOCK_TERMS):
            row_mask = is_row if IS_EVEN else is_row & (term[:, None] < NUM_TERMS - begin)
            mask = None if IS_EVEN else is_column & (term[None, :] < NUM_TERMS - begin)
            values = tl.load(x + row * NUM_TERMS + begin + term[:, None], mask=row_mask, other=0.0)
            result = tl.dot(_load_once(weights + begin, mask), values, acc=result)
            if IS_GATED:
                up = tl.dot(_load_once(up_weights + begin, mask), values, acc=up)

    if HAS_BIAS:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    if IS_GATED:
        if HAS_BIAS:
            up += tl.load(bias + NUM_COLUMNS + column, mask=is_column, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * up
    at = row * NUM_COLUMNS + column
    is_element = is_column & is_row
    if HAS_RESIDUAL:
        result += tl.load(residual + at, mask=is_element, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_element)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias` `[T, m]` of a few contiguous rows `x` [T, n].

    `x` has at most MAX_ROWS rows, or MAX_GATED_ROWS with `is_gated`. `weight` is contiguous `[m, n]`, `bias`
    `[m]`. `norm` is applied to the rows before the product. With `is_gated` the result is `silu(gates) *
    values` `[T, m / 2]`: gates are the first half of the product, values the second. `residual`, of the
    result's shape, is added. All tensors are bfloat16 or float16; sums are float32, rounded once. Raises
    ValueError for other tensors.
    """
    num_rows, num_terms = x.shape
    most_rows = MAX_GATED_ROWS if is_gated else MAX_ROWS
    check_tensor("rows", x, (min(num_rows, most_rows), num_terms), DTYPES, x)
    num_columns = weight.shape[0] // (2 if is_gated else 1)
    check_tensor("weights", weight, (num_columns * (2 if is_gated else 1), num_terms), [x.dtype], x)
    if bias is not None:
        check_tensor("bias", bias, weight.shape[:1], [x.dtype], x)
    if residual is not None:
        check_tensor("residual", residual, (num_rows, num_columns), [x.dtype], x)
    if norm is not None:
        check_tensor("the norm's weight", norm.weight, (num_terms,), [x.dtype], x)
        if num_rows > 1:
            x, norm = rms_norm(x, *norm), None
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = tile or default_tile(num_rows, num_columns, is_plain=norm is None and not is_gated)
    launch(
        _skinny_linear, (triton.cdiv(num_columns, tile.block_columns),),
        x, weight, x if bias is None else bias, x if residual is None else residual,
        x if norm is None else norm.weight, out, num_rows, 0.0 if norm is None else norm.eps,
        NUM_COLUMNS=num_columns, NUM_TERMS=num_terms, BLOCK_ROWS=block_rows(num_rows),
        BLOCK_COLUMNS=tile.block_columns, BLOCK_TERMS=tile.block_terms,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        IS_GATED=is_gated, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
