"""Copies of KVCache pages between two arrangements in memory, while other threads compute (page_copy.h).

Owns: the call of the compiled code. Does not know: which pages are copied, and why.
"""

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_int64, c_void_p

import numpy as np
import torch

from kernels.cpu.library import Library


class _PagePart(ctypes.Structure):
    """The C++ `struct PagePart` of page_copy.h."""

    _fields_ = (
        ("source", c_void_p),
        ("target", c_void_p),
        ("source_stride", c_int64),
        ("target_stride", c_int64),
        ("num_bytes", c_int64),
    )


class PageCopies:
    """Copies of pages, from the first to the second tensor of each of `parts`.

    Both tensors of a part have one dtype and the shape `[num_pages, ...]`, in which only the numbers of pages
    may differ. The elements of a page lie in one piece; pages may lie apart.
    """

    def __init__(self, library: Library, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Describe `parts` to the compiled code. Raises ValueError for tensors of other shapes or dtypes."""
        self._parts = list(parts)
        """The tensors, kept so that their addresses stay valid."""
        self._described = (_PagePart * len(self._parts))(*(_described(*part) for part in self._parts))
        self._nums_pages = [
            min((len(tensor) for tensor in side), default=0) for side in zip(*self._parts, strict=True)
        ]
        """The fewest pages of any first tensor, and the fewest pages of any second tensor."""
        self._copy = library.code.copy_pages
        self._copy.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int64)
        self.page_bytes = sum(part.num_bytes for part in self._described)
        """Bytes of a page, all parts together."""

    def copy(
        self, sources: Sequence[int], targets: Sequence[int] | None = None, parts: range | None = None
    ) -> None:
        """Copy page `sources[i]` to page `targets[i]` for each i; without `targets`, to page `sources[i]`.

        `parts` are the indices of the parts to copy; None: all parts. Blocking, without the interpreter's
        lock. Raises IndexError for pages or parts that do not exist, or if the lengths differ.
        """
        parts = range(len(self._parts)) if parts is None else parts
        if not (sources and parts):
            return
        numbers = [sources, sources if targets is None else targets]
        for pages, num_pages in zip(numbers, self._nums_pages, strict=True):
            if not 0 <= min(pages) <= max(pages) < num_pages:
                raise IndexError(f"pages {min(pages)} to {max(pages)} of {num_pages}")
        of_sources, of_targets = (np.array(pages, np.int64) for pages in numbers)
        if len(of_sources) != len(of_targets) or not 0 <= parts.start < parts.stop <= len(self._parts):
            raise IndexError(f"{len(of_sources)} pages to {len(of_targets)}, {parts} of {len(self._parts)}")
        first = ctypes.byref(self._described, parts.start * ctypes.sizeof(_PagePart))
        self._copy(first, len(parts), of_sources.ctypes.data, of_targets.ctypes.data, len(of_sources))


def _described(source: torch.Tensor, target: torch.Tensor) -> _PagePart:
    if (source.dtype, source.shape[1:]) != (target.dtype, target.shape[1:]):
        raise ValueError(
            f"pages of {source.dtype} {list(source.shape)} are not {target.dtype} {list(target.shape)}"
        )
    if not (source[:1].is_contiguous() and target[:1].is_contiguous()):
        raise ValueError(f"pages do not lie in one piece: strides {source.stride()} and {target.stride()}")
    size = source.dtype.itemsize
    return _PagePart(
        source.data_ptr(),
        target.data_ptr(),
        source.stride(0) * size,
        target.stride(0) * size,
        source[:1].numel() * size,
    )
