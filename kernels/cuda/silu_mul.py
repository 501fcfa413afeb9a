"""The gate of an MLP: `silu(gate) * up`, where `gate` and `up` are the halves of one product.

Bytes moved: 3 numbers for each element of the result.

Owns: the reference, the kernel, its launch. Does not know: layers.
"""

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import FLOATS, check_tensor, launch

_BLOCK = 1024


def bytes_moved(num_rows: int, num_columns: int, item_bytes: int) -> int:
    """Return the bytes moved for a result `[num_rows, num_columns]`."""
    return 3 * num_rows * num_columns * item_bytes


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`, computed in torch and float32 and rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _silu_mul(gate_up, out, num_columns, BLOCK: tl.constexpr):
    """Compute a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    gate = tl.load(gate_up + row * 2 * num_columns + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * num_columns + column, mask=is_column, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * num_columns + column, result.to(out.dtype.element_ty), mask=is_column)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` `[T, n]` from contiguous `gate_up` [T, 2 * n], gates first.

    The dtype is float32, bfloat16 or float16. Raises ValueError for other tensors.
    """
    num_rows, num_both = gate_up.shape
    check_tensor("gates and values", gate_up, (num_rows, num_both // 2 * 2), FLOATS, gate_up)
    num_columns = num_both // 2
    out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows > 0:
        launch(
            _silu_mul,
            (num_rows, triton.cdiv(num_columns, _BLOCK)),
            gate_up,
            out,
            num_columns,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out
