"""Products with packed weights on the CPU (linear.h): `x @ W.T`, plus a bias, plus a residual.

Reference: `torch.nn.functional.linear`. Bytes moved: the weights once, x once for each panel of the weights
(48 columns; 16 with AVX2), from the processor's cache while x fits there. Sums are in float32, rounded once.

An element of the result does not depend on the number of rows, bit for bit.

Owns: the packed weights and the checks. Does not know: layers.
"""

from ctypes import c_int64, c_void_p

import torch

from kernels.cpu.library import Library
from kernels.cpu.memory import HugeMemory


class PackedLinear:
    """A weight matrix `[N, K]`, copied into the order in which products read it. It cannot be changed.

    `weight`: bfloat16 or float32, contiguous, on the CPU, K even. `bias`: `[N]` of the same dtype, or None.
    Matrices that share a `memory` lie side by side. Raises ValueError for other tensors.
    """

    def __init__(
        self,
        library: Library,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        memory: HugeMemory | None = None,
    ) -> None:
        _check("weights", weight, (weight.shape[0], weight.shape[1]), weight.dtype)
        if weight.shape[1] % 2:
            raise ValueError(f"expected weights with an even number of columns, got {list(weight.shape)}")
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        if bias is not None:
            _check("bias", bias, (self.out_features,), self.dtype)
        arguments = (
            c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p,
        )  # fmt: skip
        self._linear = library.function("linear", self.dtype, *arguments)
        self._linear_to_float32 = library.function("linear_to_float32", self.dtype, *arguments)
        self._unpack = library.function("unpack", self.dtype, c_void_p, c_int64, c_void_p, c_int64, c_void_p)
        count = library.function("packed_words", self.dtype, c_int64, c_int64)
        count.restype = c_int64
        pack = library.function("pack", self.dtype, c_void_p, c_int64, c_int64, c_void_p)
        self.packed = (memory or HugeMemory()).zeros((count(*weight.shape),), torch.int32)
        """The memory of the matrix."""
        self.address = self.packed.data_ptr()
        self.bias_address = None if bias is None else bias.data_ptr()
        pack(weight.data_ptr(), self.out_features, self.in_features, self.address)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return `x @ W.T + bias + residual`: `[T, N]` for `x` [T, K] and `residual` [T, N], all contiguous.

        `out_dtype` is the weights' dtype (default) or float32. Raises ValueError for other shapes or
        dtypes.
        """
        num_rows = x.shape[0]
        _check("x", x, (num_rows, self.in_features), self.dtype)
        if residual is not None:
            _check("the residual", residual, (num_rows, self.out_features), self.dtype)
        if out_dtype not in (None, torch.float32, self.dtype):
            raise ValueError(f"expected {self.dtype} or float32 as out_dtype, got {out_dtype}")
        y = torch.empty((num_rows, self.out_features), dtype=out_dtype or self.dtype)
        function = self._linear if y.dtype is self.dtype else self._linear_to_float32
        function(
            x.data_ptr(),
            num_rows,
            self.in_features,
            self.address,
            self.out_features,
            self.bias_address,
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
        )
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix, as an embedding does: `[T, K]` for int64 `ids` [T].

        Raises IndexError for ids outside the matrix, ValueError for other tensors.
        """
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_contiguous() or not ids.is_cpu:
            raise ValueError(f"expected int64 ids of one dimension, got {ids.dtype} {list(ids.shape)}")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.out_features):
            raise IndexError(f"expected ids in [0, {self.out_features}), got up to {int(ids.max())}")
        rows = torch.empty((len(ids), self.in_features), dtype=self.dtype)
        self._unpack(self.address, self.in_features, ids.data_ptr(), len(ids), rows.data_ptr())
        return rows


class GatedLinear:
    """The gated product `silu(gate(x)) * up(x)`, whose two factors never go to memory.

    Reference: `torch.nn.functional.silu`. Raises ValueError for matrices of different shapes or types.
    """

    def __init__(self, library: Library, gate: PackedLinear, up: PackedLinear) -> None:
        shapes = [(m.dtype, m.out_features, m.in_features) for m in (gate, up)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"expected gates like ups, got {shapes[0]} and {shapes[1]}")
        self.gate, self.up = gate, up
        self.dtype, self.out_features, self.in_features = shapes[0]
        self._function = library.function(
            "gated_linear",
            self.dtype,
            c_void_p,
            c_int64,
            c_int64,
            *[c_void_p] * 2,
            c_int64,
            *[c_void_p] * 3,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, `[T, N]`, for contiguous `x` [T, K] of the weights' dtype.

        Raises ValueError for other tensors.
        """
        _check("x", x, (x.shape[0], self.in_features), self.dtype)
        y = torch.empty((x.shape[0], self.out_features), dtype=self.dtype)
        self._function(
            x.data_ptr(),
            x.shape[0],
            self.in_features,
            self.gate.address,
            self.up.address,
            self.out_features,
            self.gate.bias_address,
            self.up.bias_address,
            y.data_ptr(),
        )
        return y


def _check(what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"expected {what} as contiguous {dtype} {list(shape)} on the CPU, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
