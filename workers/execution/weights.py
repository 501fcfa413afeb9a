"""Readers of a checkpoint's weights, tensor by tensor.

Owns: the conversion of safetensors (memory-mapped) and GGUF (dequantized) to torch tensors with Hugging Face
names. Does not know: which tensors a model needs, their device or final dtype.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from mooncake.errors import ModelError
from mooncake.model.checkpoint import Checkpoint, CheckpointKind
from mooncake.model.gguf_file import GGUFHeader, GGUFTensor, read_gguf_header
from mooncake.model.gguf_model import hf_tensor_name, in_hf_row_order
from mooncake.model.safetensors_file import read_safetensors_header
from mooncake.model.weight_files import LAYER_NAME

Progress = Callable[[int, int], None]


def iter_weights(
    checkpoint: Checkpoint, layers: Collection[int], on_progress: Progress, *, has_ends: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of `layers` as pairs of Hugging Face name and CPU tensor.

    With `has_ends`, the weights outside any layer are yielded too (embeddings, final norm, head).

    Tensors of safetensors keep their dtype and alias the mapped file, so no bytes are read before they are
    used. GGUF tensors are float32. `on_progress(done, total)` is called after each tensor; both arguments are
    bytes on disk. Raises ModelError for a damaged file, and for a DUMMY checkpoint, which has no weights.
    """

    def is_wanted(name: str) -> bool:
        match = LAYER_NAME.match(name)
        return has_ends if match is None else int(match[1]) in layers

    match checkpoint.kind:
        case CheckpointKind.SAFETENSORS:
            return _iter_safetensors(checkpoint, is_wanted, on_progress)
        case CheckpointKind.GGUF:
            return _iter_gguf(read_gguf_header(checkpoint.path), is_wanted, on_progress)
        case CheckpointKind.DUMMY:
            raise ModelError(
                f"{checkpoint.path} was opened with load_format dummy; it has no weights to read"
            )


def _iter_safetensors(
    checkpoint: Checkpoint, is_wanted: Callable[[str], bool], on_progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    wanted: dict[Path, dict[str, int]] = {}
    for path in checkpoint.weight_files:
        tensors = read_safetensors_header(path).tensors
        wanted[path] = {name: entry.size_bytes for name, entry in tensors.items() if is_wanted(name)}
    total_bytes = sum(sum(sizes.values()) for sizes in wanted.values())
    done_bytes = 0
    for path, sizes in wanted.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name, size_bytes in sizes.items():
                    yield name, file.get_tensor(name)
                    done_bytes += size_bytes
                    on_progress(done_bytes, total_bytes)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}; download it again") from error


def _iter_gguf(
    header: GGUFHeader, is_wanted: Callable[[str], bool], on_progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    named = [(hf_tensor_name(tensor.name), tensor) for tensor in header.tensors.values()]
    wanted = [(name, tensor) for name, tensor in named if name is not None and is_wanted(name)]
    total_bytes = sum(tensor.size_bytes for _, tensor in wanted)
    done_bytes = 0
    for name, tensor in wanted:
        yield name, _dequantize(header, tensor)
        done_bytes += tensor.size_bytes
        on_progress(done_bytes, total_bytes)


def _dequantize(header: GGUFHeader, tensor: GGUFTensor) -> torch.Tensor:
    """Return `tensor` as float32 `[rows, columns]` or `[rows]`, with rows in Hugging Face's order."""
    try:
        stored = np.fromfile(header.path, np.uint8, count=tensor.size_bytes, offset=tensor.offset)
        values = gguf.dequantize(stored.reshape(*tensor.shape[:-1], -1), tensor.encoding)
        ordered = in_hf_row_order(header, tensor.name, values.reshape(tensor.shape))
    except (OSError, ValueError) as error:
        raise ModelError(f"{header.path}: tensor {tensor.name} cannot be read: {error}") from error
    except NotImplementedError as error:
        raise ModelError(
            f"{header.path}: tensor {tensor.name} is encoded as {tensor.encoding.name}, which cannot be "
            "dequantized; use another quantization"
        ) from error
    return torch.from_numpy(ordered)
