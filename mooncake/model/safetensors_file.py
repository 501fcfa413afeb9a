"""The header of a safetensors file: its tensors, and the check that the file is whole.

Owns: the container format and its checks against the file's true size, without touching tensor data. Does not
know: what the tensors are for.

Format: https://huggingface.co/docs/safetensors (u64 header length, JSON header, data without holes).
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from mooncake.errors import ModelError
from mooncake.model.files import opened

_MAX_HEADER_BYTES = 16 << 20
"""Bytes of the largest header: some 100,000 tensors."""
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)


class SafetensorsTensor(NamedTuple):
    """The entry of a tensor in a safetensors file; `dtype` is one of the format's names in `DTYPE_BITS`."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a safetensors file: its tensors by name, and the bytes before the data."""

    tensors: dict[str, SafetensorsTensor]
    header_bytes: int


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Return the parsed and checked header of `path`.

    Raises ModelError if the file cannot be read, is no safetensors file, or is not exactly as long as its
    tensors need.
    """
    try:
        with opened(path) as file:
            actual_bytes = os.fstat(file.fileno()).st_size
            header_bytes = 8 + struct.unpack("<Q", file.read(8))[0]
            if header_bytes > min(actual_bytes, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes in a file of {actual_bytes}")
            entries = _header_decoder.decode(file.read(header_bytes - 8))
        tensors, data_bytes = _tensors(entries)
    except (struct.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no safetensors file or damaged: {error}; download it again") from None
    needed_bytes = header_bytes + data_bytes
    if needed_bytes != actual_bytes:
        raise ModelError(
            f"{path} is truncated or damaged: its tensors need {needed_bytes} bytes, it has {actual_bytes}; "
            "download it again"
        )
    return SafetensorsHeader(tensors, header_bytes)


def _tensors(header: dict[str, msgspec.Raw]) -> tuple[dict[str, SafetensorsTensor], int]:
    """Return the tensors in the order of their data, and the bytes of all data. Raises ValueError."""
    entries = {name: _entry_decoder.decode(raw) for name, raw in header.items() if name != "__metadata__"}
    tensors, data_bytes = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPE_BITS:
            raise ValueError(f"tensor {name!r} is of the unknown dtype {entry.dtype!r}")
        begin, end = entry.data_offsets
        size_bytes = math.prod(entry.shape) * DTYPE_BITS[entry.dtype] // 8
        if begin != data_bytes or end - begin != size_bytes:
            raise ValueError(f"tensor {name!r} of {size_bytes} bytes lies at {begin} to {end}")
        data_bytes += size_bytes
        tensors[name] = SafetensorsTensor(entry.dtype, tuple(entry.shape), size_bytes)
    return tensors, data_bytes
