"""The files of a model's weights: their names, the check that they are whole, and their digest.

Owns: a Hugging Face directory's choice of safetensors files and the digest that stands for a model's weights.
Does not know: what tensors are called in each format, what is done with them.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from mooncake.errors import ModelError
from mooncake.model.config import ModelConfig
from mooncake.model.files import opened
from mooncake.model.safetensors_file import DTYPE_BITS, read_safetensors_header

LAYER_NAME = re.compile(r"(?:(?:model\.)?(?:decoder\.)?layers|blk)\.(\d{1,9})\.")
"""The beginning of a layer's tensor names, in safetensors and GGUF."""
_UNSCALED_DTYPES = frozenset(DTYPE_BITS) - {"F64", "F32", "F16", "BF16"}
"""Dtypes of safetensors whose numbers mean nothing without scales. Scales are not read.

GGUF's integers have the same names.
"""
# Old Llama checkpoints carry the rotary frequencies, which are computed instead.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
_INDEX_NAME = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 16 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLE_STRIDE_BYTES = 16 << 20
_MAX_SAMPLES = 64


class _Index(msgspec.Struct):
    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


_index_decoder = msgspec.json.Decoder(_Index)


class Tensor(NamedTuple):
    """A tensor as its file describes it; `dtype` is one of the format's own names."""

    name: str
    dtype: str
    shape: Sequence[int]


class WeightFile(NamedTuple):
    """A file of weights. `label` is its name in the digest; empty where the name has no meaning."""

    label: str
    path: Path
    header_bytes: int


def safetensors_files(directory: Path, model: ModelConfig) -> list[WeightFile]:
    """Return the weight files of `model`, each checked to be whole.

    Each file must have the tensors that the index says it has. Raises ModelError.
    """
    index_path = directory / _INDEX_NAME
    mapped = _weight_map(index_path) if os.path.lexists(index_path) else {}
    if mapped:
        names = sorted(set(mapped.values()))
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ModelError(f"{directory} lacks {', '.join(missing[:5])}, which {_INDEX_NAME} names")
    elif os.path.lexists(directory / "model.safetensors"):
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ModelError(
            f"{directory} has no *.safetensors files; other weight formats (.bin, .pth) are not read"
        )
    headers = {name: read_safetensors_header(directory / name) for name in names}
    for name, header in headers.items():
        tensors = (Tensor(tensor, entry.dtype, entry.shape) for tensor, entry in header.tensors.items())
        check_tensors(directory / name, tensors, model)
    for tensor, file_name in mapped.items():
        if tensor not in headers[file_name].tensors:
            raise ModelError(
                f"{directory / file_name} lacks tensor {tensor!r}, which the index says it holds"
            )
    return [WeightFile(name, directory / name, header.header_bytes) for name, header in headers.items()]


def _weight_map(index_path: Path) -> dict[str, str]:
    """Return the name of the file that has each tensor, as the index says. Raises ModelError."""
    with opened(index_path, _MAX_INDEX_BYTES) as file:
        content = file.read(_MAX_INDEX_BYTES)
    try:
        weight_map = _index_decoder.decode(content).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelError(f"{index_path} has no weight_map that can be read: {error}") from None
    if strange := [name for name in weight_map.values() if Path(name).name != name]:
        raise ModelError(f"{index_path} names {strange[0]!r}; expected files beside it")
    return weight_map


def check_tensors(path: Path, tensors: Iterable[Tensor], model: ModelConfig) -> None:
    """Check that the layers, dtypes and sizes of tensors fit `model`. Raises ModelError.

    Layers beyond the last would be left out, and integers without their scales would be taken for weights:
    the model would produce nonsense. A tensor with more numbers than the whole model is refused before memory
    is taken for it. Whether a tensor is missing is not checked here.
    """
    for name, dtype, shape in tensors:
        layer = LAYER_NAME.match(name)
        if layer is not None and int(layer[1]) >= model.num_hidden_layers:
            raise ModelError(
                f"{path}: tensor {name!r} is of a layer beyond the {model.num_hidden_layers} that the"
                " configuration names"
            )
        if dtype in _UNSCALED_DTYPES and not name.endswith(_COMPUTED_SUFFIX):
            raise ModelError(
                f"{path}: tensor {name!r} is {dtype}, which means nothing without scales, and those are not"
                " read; use the unquantised checkpoint or a GGUF file"
            )
        if math.prod(shape) > model.num_parameters:
            raise ModelError(
                f"{path}: tensor {name!r} has the shape {list(shape)}, which is more than the whole model of"
                f" this configuration: {model.num_parameters} numbers"
            )


def weights_digest(files: Iterable[WeightFile]) -> str:
    """Return the hexadecimal SHA-256 of the files' names, sizes and headers, and of samples of their data.

    The samples are both ends, and a piece of each stride. Hashing every byte would take minutes for a large
    model. Headers, sizes and samples already differ between any two models that could be mixed up: a
    fine-tune changes nearly every weight.
    """
    digest = hashlib.sha256()
    for file in files:
        with opened(file.path) as content:
            size_bytes = os.fstat(content.fileno()).st_size
            digest.update(f"{file.label}\0{size_bytes}\0".encode())
            digest.update(content.read(file.header_bytes))
            stride = max(_SAMPLE_STRIDE_BYTES, size_bytes // _MAX_SAMPLES)
            last = max(file.header_bytes, size_bytes - _SAMPLE_BYTES)
            for start in (*range(file.header_bytes, last, stride), last):
                content.seek(start)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()
