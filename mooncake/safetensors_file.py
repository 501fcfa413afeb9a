"""Reading a safetensors file's header: which tensors it holds, and whether the file is whole.

Owns: the container format and its checks against the file's true size, without touching tensor data. Does not
know: what the tensors are for.

Format: https://huggingface.co/docs/safetensors (u64 header length, JSON header, data without holes).
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from mooncake.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """`size_bytes` of each tensor by name; `header_bytes`: the length of everything before the data."""

    size_bytes: dict[str, int]
    header_bytes: int


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Parse and check the header of `path`.

    Raises ModelError where the file cannot be read, is no safetensors file, or is not exactly as long as its
    tensors need.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            actual_bytes = path.stat().st_size
            header_bytes = 8 + struct.unpack("<Q", prefix)[0]
            if header_bytes > min(actual_bytes, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes in a file of {actual_bytes}")
            entries = json.loads(file.read(header_bytes - 8))
        needed_bytes, sizes = header_bytes, {}
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            size_bytes = math.prod(entry["shape"]) * _DTYPE_BITS[entry["dtype"]] // 8
            if begin != needed_bytes - header_bytes or end - begin != size_bytes:
                raise ValueError(f"tensor {name!r} of {size_bytes} bytes lies at {begin} to {end}")
            needed_bytes += size_bytes
            sizes[name] = size_bytes
    except OSError as error:
        raise ModelError(f"cannot read safetensors file {path}: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no safetensors file or damaged: {error}; download it again") from error
    if needed_bytes != actual_bytes:
        raise ModelError(
            f"{path} is truncated or damaged: its tensors need {needed_bytes} bytes, it has {actual_bytes}; "
            "download it again"
        )
    return SafetensorsHeader(sizes, header_bytes)
