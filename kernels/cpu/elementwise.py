"""Elementwise operations of a decoder layer on the CPU, each in one pass over memory (elementwise.h).

References: `torch.nn.functional.rms_norm`; `kernels.kv_copy.write_kv` for the pages. Bytes moved:
each input is read once and each output written once. Values are rounded to the dtype once, at the end.

Owns: the checks. Does not know: layers.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from kernels.cpu.library import Library
from kernels.head_norms import HeadNorms

MULTIPLE = 16
"""Every row length in norms is a multiple of this number.

Every head size in rotations is a multiple of twice this number.
"""


class _Slots(ctypes.Structure):
    """The C++ `struct Slots` of elementwise.h."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("pages", c_void_p),
        ("offsets", c_void_p),
        ("num_tokens", c_int64),
    )


class _Pages(ctypes.Structure):
    """The C++ `struct Pages` of elementwise.h."""

    _fields_ = (
        ("num_pages", c_int64),
        ("num_heads", c_int),
        ("num_kv_heads", c_int),
        ("num_kept", c_int),
        ("head_dim", c_int),
        ("page_size", c_int),
    )


class Slots:
    """The token slots of T tokens, and the tokens' rotary angles.

    `cos` and `sin` of the angles are float32 `[T, head_dim / 2]`; `pages` and `offsets` are int64 `[T]`. All
    are contiguous, on the CPU. They are checked once, for all layers of a batch. Raises ValueError for other
    tensors.
    """

    def __init__(
        self, cos: torch.Tensor, sin: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        for name, angles in (("cos", cos), ("sin", sin)):
            _check(name, angles, (len(pages), cos.shape[-1]), torch.float32)
        for name, places in (("page numbers", pages), ("offsets", offsets)):
            _check(name, places, (len(pages),), torch.int64)
        self.cos, self.sin, self.pages, self.offsets = cos, sin, pages, offsets
        self.head_dim = 2 * cos.shape[-1]
        self._slots = _Slots(*(tensor.data_ptr() for tensor in (cos, sin, pages, offsets)), len(pages))
        self.address = ctypes.addressof(self._slots)
        """Address of the description, for C++ code that reads it."""

    def __len__(self) -> int:
        return len(self.pages)


class Elementwise:
    """The elementwise operations, for contiguous CPU tensors of one dtype, bfloat16 or float32.

    Every method raises ValueError for other tensors.
    """

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rms_norm = library.function(
            "rms_norm", dtype, c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p
        )
        self._rotate_and_write = library.function("rotate_and_write", dtype, *[c_void_p] * 6, c_float)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return `x / sqrt(mean(x^2) + eps) * weight` of each row of `x` [T, n], with `weight` [n].

        Raises ValueError unless n is a multiple of 16.
        """
        num_rows, n = x.shape
        _check("x", x, x.shape, self._dtype)
        _check("weights", weight, (n,), self._dtype)
        if n % MULTIPLE:
            raise ValueError(f"expected rows of a multiple of {MULTIPLE} elements, got {n}")
        y = torch.empty_like(x)
        self._rms_norm(x.data_ptr(), num_rows, n, weight.data_ptr(), eps, y.data_ptr())
        return y

    def rotate_and_write(
        self, qkv: torch.Tensor, kv_layer: torch.Tensor, slots: Slots, norms: HeadNorms | None = None
    ) -> None:
        """Rotate the queries in place, and write the rotated keys, and the values, to their pages.

        `qkv` [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; head_dim % 32 == 0.
        `kv_layer` [num_pages, num_kv_heads, 2, page_size, head_dim]. The rotated pairs are elements
        (i, i + head_dim / 2). `norms` come before the rotation; None if the model has none. The keys in `qkv`
        are undefined afterwards. Raises ValueError also for slots outside the pages.
        """
        num_pages, num_kv_heads, _, page_size, head_dim = kv_layer.shape
        num_tokens, num_rows, _ = qkv.shape
        _check("queries, keys and values", qkv, (num_tokens, num_rows, head_dim), self._dtype)
        _check("pages", kv_layer, (num_pages, num_kv_heads, 2, page_size, head_dim), self._dtype)
        if len(slots) != num_tokens or slots.head_dim != head_dim:
            raise ValueError(
                f"expected angles and places of {num_tokens} tokens for a head_dim of {head_dim}, "
                f"got those of {len(slots)} for {slots.head_dim}"
            )
        if head_dim % (2 * MULTIPLE) or num_rows <= 2 * num_kv_heads:
            raise ValueError(f"expected heads of a multiple of {2 * MULTIPLE}, got {list(qkv.shape)}")
        if norms is not None:
            _check("query norm", norms.query, (head_dim,), self._dtype)
            _check("key norm", norms.key, (head_dim,), self._dtype)
        num_heads = num_rows - 2 * num_kv_heads
        pages = _Pages(num_pages, num_heads, num_kv_heads, num_kv_heads, head_dim, page_size)
        is_written = self._rotate_and_write(
            qkv.data_ptr(),
            kv_layer.data_ptr(),
            slots.address,
            ctypes.addressof(pages),
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            0.0 if norms is None else norms.eps,
        )
        if not is_written:
            raise ValueError(
                f"expected slots in {num_pages} pages of {page_size} tokens, "
                f"got pages {slots.pages.tolist()} and offsets {slots.offsets.tolist()}"
            )


def _check(what: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"expected {what} as contiguous {dtype} {list(shape)} on the CPU, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
