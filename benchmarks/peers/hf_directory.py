"""A checkpoint as a Hugging Face directory, for engines that read no other format.

Owns: the files, in bfloat16. Does not know: which engine reads them.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from mooncake.model.checkpoint import Checkpoint
from mooncake.model.gguf_file import read_gguf_header
from mooncake.model.gguf_tokenizer import build_tokenizer
from workers.execution.weights import iter_weights


def hf_directory(checkpoint: Checkpoint, folder: Path) -> Path:
    """Return the Hugging Face directory of a .gguf `checkpoint`. It is written into `folder` on first use."""
    directory = folder / f"{checkpoint.name}-{checkpoint.weights_digest[:16]}"
    if not directory.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            _write(checkpoint, Path(unfinished) / directory.name)
            (Path(unfinished) / directory.name).rename(directory)
    return directory


def _write(checkpoint: Checkpoint, directory: Path) -> None:
    directory.mkdir()
    layers = range(checkpoint.model.num_hidden_layers)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in iter_weights(checkpoint, layers, lambda _done, _total: None)
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(checkpoint.config, indent=2))
    backend = build_tokenizer(read_gguf_header(checkpoint.path))
    eos_token = backend.id_to_token(checkpoint.eos_token_ids[0])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token).save_pretrained(directory)
