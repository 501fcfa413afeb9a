"""Checks before any process of a node starts, which report a mistake within a second.

Owns: the checks of models, ports, devices, memory, keys and certificates. Does not know: what the processes
do with them.
"""

import ctypes
import ssl
from pathlib import Path

from mooncake.cli.model_trial import try_programs
from mooncake.config.sections import HttpConfig, SecurityConfig
from mooncake.config.settings import Config
from mooncake.errors import ConfigError, ModelError
from mooncake.model.checkpoint import Checkpoint, kv_layout, open_checkpoint
from mooncake.model.files import opened, read_json
from mooncake.model.gguf_file import read_gguf_header
from mooncake.model.gguf_tokenizer import pre_tokenizer_of
from mooncake.node.listeners import check_free, listen_addresses
from mooncake.security.api_keys import load_api_keys
from mooncake.security.certificates import load_certificate, node_context

MAX_TEMPLATE_BYTES = 1 << 20
_TOKENIZER_FILES = (
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


def check_node(config: Config) -> None:
    """Check a node's configuration before its processes start.

    Raises the ConfigError or ModelError that a process of the node would raise later.
    """
    check_free(listen_addresses(config))
    if config.has_pool:
        _check_certificates(config.security)
    if config.role == "pool":
        return  # the client that stores the first block says of which model
    checkpoint = open_checkpoint(config.model, config.load_format)
    if config.runs_instances:
        _check_device(config.worker.device)
        _check_pool(config, checkpoint)
    if config.has_api:
        _check_tokenizer(checkpoint)
        _check_api(config.http)


def _check_device(name: str) -> None:
    """Check that there is a driver for a configured GPU. Raises ConfigError.

    Whether there is a GPU of this number is checked later, by Torch, which is slow to load.
    """
    if name.startswith("cuda"):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise ConfigError(
                f"worker.device: {name} was asked for, but this machine has no CUDA driver (libcuda.so.1);"
                " install it, or use cpu"
            ) from None


def _check_certificates(security: SecurityConfig) -> None:
    if security.tls_cert is not None:
        node_context(ssl.PROTOCOL_TLS_SERVER, security.tls_cert, security.tls_key, security.tls_ca)


def _check_pool(config: Config, checkpoint: Checkpoint) -> None:
    """Check that `kvcache.pool_bytes` can hold the smallest shard of a block. Raises ConfigError."""
    dtype = checkpoint.dtype_of(config.dtype)
    layout = kv_layout(checkpoint, config.kvcache.block_size, dtype)
    num_parts = config.worker.tensor_parallel * config.pipeline.stages
    least_bytes, pool_bytes = layout.block_bytes // num_parts, int(config.kvcache.pool_bytes)
    if pool_bytes < least_bytes:
        raise ConfigError(
            f"kvcache.pool_bytes: {pool_bytes} bytes cannot hold a block of {least_bytes} bytes;"
            " a size takes a unit, such as 4GiB"
        )


def _check_api(http: HttpConfig) -> None:
    for file in (http.api_keys_file, http.admin_keys_file):
        if file is not None:
            load_api_keys(file)
    if http.tls_cert is not None and http.tls_key is not None:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), http.tls_cert, http.tls_key)


def _check_tokenizer(checkpoint: Checkpoint) -> None:
    """Check that there is a tokenizer, and that its programs end (`mooncake.cli.model_trial`).

    The tokenizer is not loaded, which would take seconds. Raises ModelError.
    """
    path, tokenizer = checkpoint.path, None
    if path.is_file():
        header = read_gguf_header(path)
        pre_tokenizer_of(header)
        template = header.metadata.get("tokenizer.chat_template")
    else:
        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError(f"{path} has no tokenizer; put tokenizer.json beside config.json")
        template, tokenizer = _template_in(path), path / "tokenizer.json"
    named = template if isinstance(template, list) else [{"template": template}]
    texts = [each.get("template") for each in named if isinstance(each, dict)]
    try:
        try_programs([text for text in texts if isinstance(text, str)], tokenizer)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _template_in(directory: Path) -> object:
    """Return the chat template of a Hugging Face directory, or its list of templates; None without one."""
    own, configuration = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if own.is_file():
        with opened(own, MAX_TEMPLATE_BYTES) as file:
            return file.read().decode(errors="replace")
    if configuration.is_file():
        return read_json(configuration, 8 * MAX_TEMPLATE_BYTES).get("chat_template")
    return None
