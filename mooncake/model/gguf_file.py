"""The header of a GGUF file: its metadata and the position of each tensor.

Owns: the container format (GGUF 2 and 3, little-endian) and its checks against the file's true size, without
touching tensor data. Does not know: what the metadata means (`gguf_model`), how a tensor is dequantized
(`workers.execution.weights`).
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mooncake.errors import ModelError
from mooncake.model.files import opened

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# GGUF's value types that have a fixed size, as struct formats.
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Several times what the largest vocabularies need.
_MAX_HEADER_BYTES = 64 << 20
_MAX_STRINGS = 1 << 21
_MAX_KEYS = 1 << 12
_MAX_TENSORS = 1 << 16


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The entry of a tensor in a GGUF file: type, shape and position.

    `shape` is row-major (outermost first); `offset` counts from the file's start.
    """

    name: str
    shape: tuple[int, ...]
    encoding: GGMLQuantizationType
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a GGUF file. `header_bytes` is the length of everything before the tensor data."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    header_bytes: int


class _Cursor:
    """A read position in the header. A read past the header's end raises `struct.error` or `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position, self.num_strings = data, 0, 0

    def scalar(self, code: str) -> Any:
        """Return the next little-endian value with the struct format `code`."""
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        """Return the next `count` numbers, each with the struct format `code`.

        Made for a few numbers; long arrays are read by `value`.
        """
        return struct.unpack(f"<{count}{code}", self._bytes(struct.calcsize(f"<{code}") * count))

    def string(self) -> str:
        """Return the next string: UTF-8 behind its 64-bit length."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Return the next `count` strings."""
        self.num_strings += count
        if self.num_strings > _MAX_STRINGS:
            raise ValueError(f"it has more than {_MAX_STRINGS} strings")
        data, end, found = self.data, self.position, []
        for _ in range(count):
            start = end + 8
            end = start + _LENGTH.unpack_from(data, end)[0]
            if end > len(data):
                raise ValueError(f"a string at offset {start - 8} goes past the end of the header")
            found.append(data[start:end].decode("utf-8"))
        self.position = end
        return found

    def value(self, kind: int) -> Any:
        """Return the next metadata value, which has the GGUF type `kind`.

        An array of strings becomes a list, an array of numbers a numpy array.
        """
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALAR_FORMATS[kind])
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind == _STRING:
            return self.strings(count)
        if item_kind == _ARRAY:
            raise ValueError(f"an array of arrays at offset {self.position}; no model needs one")
        dtype = np.dtype(f"<{_SCALAR_FORMATS[item_kind]}")
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _bytes(self, size: int) -> bytes:
        start, end = self.position, self.position + size
        if end > len(self.data):
            raise ValueError(f"{size} bytes expected at offset {start}, the file or its header ends before")
        self.position = end
        return self.data[start:end]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Return the parsed and checked header of `path` (in about 0.05 s for a vocabulary of 50,000).

    Raises ModelError if the file is no GGUF, of another version, damaged, or too short for its tensors.
    """
    try:
        with opened(path) as file:
            actual_bytes = os.fstat(file.fileno()).st_size
            size_bytes = min(actual_bytes, _MAX_HEADER_BYTES)
            with mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as data:
                header = _parse(path, _Cursor(data))
    except KeyError as error:
        raise ModelError(
            f"{path} is a damaged GGUF file: unknown value type {error}; download it again"
        ) from error
    except (struct.error, ValueError, OverflowError) as error:
        raise ModelError(f"{path} is a damaged GGUF file: {error}; download it again") from error
    needed_bytes = max((tensor.offset + tensor.size_bytes for tensor in header.tensors.values()), default=0)
    if needed_bytes > actual_bytes:
        raise ModelError(
            f"{path} is truncated: its tensors need {needed_bytes} bytes, it has {actual_bytes}; "
            "download it again"
        )
    return header


def _parse(path: Path, cursor: _Cursor) -> GGUFHeader:
    magic = cursor.data[:4]
    if magic != _MAGIC:
        raise ValueError(f"it starts with {magic!r} instead of {_MAGIC!r}")
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in _SUPPORTED_VERSIONS:
        raise ModelError(f"{path} is GGUF version {version}; supported: {_SUPPORTED_VERSIONS}, little-endian")
    num_tensors, num_keys = cursor.scalars("Q", 2)
    if num_keys > _MAX_KEYS or num_tensors > _MAX_TENSORS:
        raise ValueError(f"it claims {num_keys} keys and {num_tensors} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    raw = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"general.alignment is {alignment!r}, expected a positive number")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GGUFTensor(name, shape, encoding, data_start + offset, _size_bytes(name, shape, encoding))
        for name, shape, encoding, offset in raw
    }
    if len(metadata) < num_keys or len(tensors) < num_tensors:
        raise ValueError("a key or a tensor stands in it twice")
    return GGUFHeader(path, metadata, tensors, cursor.position)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= 4:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions, expected 1 to 4")
    shape = tuple(reversed(cursor.scalars("Q", num_dims)))
    return name, shape, GGMLQuantizationType(cursor.scalar("I")), cursor.scalar("Q")


def _size_bytes(name: str, shape: tuple[int, ...], encoding: GGMLQuantizationType) -> int:
    block_elements, block_bytes = GGML_QUANT_SIZES[encoding]
    if shape[-1] % block_elements:
        raise ValueError(
            f"rows of tensor {name!r} have {shape[-1]} elements, no multiple of {block_elements}"
        )
    size_bytes: int = math.prod(shape) // block_elements * block_bytes
    return size_bytes
