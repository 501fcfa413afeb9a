"""The files that hold a model's weights: which they are, whether they are whole, and their digest.

Owns: a Hugging Face directory's choice of safetensors files and the digest that stands for a model's weights.
Does not know: the model's configuration.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mooncake.errors import ModelError
from mooncake.safetensors_file import read_safetensors_header

_SAMPLE_BYTES = 64 << 10
_SAMPLE_STRIDE_BYTES = 16 << 20
_MAX_SAMPLES = 64


class WeightFile(NamedTuple):
    """`label` names the file in the digest; empty where the name carries no meaning."""

    label: str
    path: Path
    header_bytes: int


def safetensors_files(directory: Path) -> list[WeightFile]:
    """The directory's weight files, each checked to be whole."""
    index_path = directory / "model.safetensors.index.json"
    mapped: dict[str, Any] = {}
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index_path} has no weight_map; download it again")
        mapped = weight_map
        names = sorted({str(file_name) for file_name in mapped.values()})
        if strange := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index_path} names {strange[0]!r}; expected files beside it")
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ModelError(
                f"{directory} lacks {', '.join(missing)}, which model.safetensors.index.json names"
            )
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ModelError(
            f"{directory} has no *.safetensors files; other weight formats (.bin, .pth) are not read"
        )
    headers = {name: read_safetensors_header(directory / name) for name in names}
    for tensor, file_name in mapped.items():
        if tensor not in headers[file_name].size_bytes:
            raise ModelError(
                f"{directory / file_name} lacks tensor {tensor!r}, which the index says it holds"
            )
    return [WeightFile(name, directory / name, header.header_bytes) for name, header in headers.items()]


def weights_digest(files: Iterable[WeightFile]) -> str:
    """SHA-256 over names, sizes, headers, and samples of the content: the ends, and a piece in every stride.

    Not all of it: hashing every byte would cost minutes for a large model, and headers, sizes and samples
    already differ between any two models that one could mix up (a fine-tune changes nearly every weight).
    """
    digest = hashlib.sha256()
    for file in files:
        size_bytes = file.path.stat().st_size
        digest.update(f"{file.label}\0{size_bytes}\0".encode())
        with file.path.open("rb") as content:
            digest.update(content.read(file.header_bytes))
            stride = max(_SAMPLE_STRIDE_BYTES, size_bytes // _MAX_SAMPLES)
            last = max(file.header_bytes, size_bytes - _SAMPLE_BYTES)
            for start in (*range(file.header_bytes, last, stride), last):
                content.seek(start)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError where it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}; give the directory of a Hugging Face model"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value
