"""The files of a model, which come from outside: their kinds, and their largest sizes.

Owns: the rule that only regular files are read, each up to a size that fits its purpose. Does not know:
contents of files.
"""

import contextlib
import json
import os
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

from mooncake.errors import ModelError

MAX_CONFIG_BYTES = 1 << 20
_MAX_METADATA_BYTES = 64 << 20
"""The most bytes of a file beside the weights: twice the size of the largest tokenizer.json."""
_METADATA_BEGINNINGS = (
    "added_tokens",
    "chat_template",
    "config",
    "generation_config",
    "merges",
    "sentencepiece",
    "special_tokens",
    "spiece",
    "tokenizer",
    "vocab",
)
_MAX_DEPTH = 64
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_directory(directory: Path) -> None:
    """Check that the files beside the weights in a model's directory may be read. Raises ModelError.

    The libraries that read tokenizers would take a FIFO for a missing file, and would read files of any size.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise ModelError(f"cannot read {directory}: {error.strerror or error}") from None
    for name in names:
        if name.startswith(_METADATA_BEGINNINGS) or name.endswith(".jinja"):
            check_file(directory / name, _MAX_METADATA_BYTES)
        elif name == "additional_chat_templates":
            check_directory(directory / name)


def check_file(path: Path, max_bytes: int | None = None) -> int:
    """Return the size of `path`. Raises ModelError if it is no regular file, or larger than `max_bytes`."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if not path.is_symlink():
            raise ModelError(f"{path.parent} has no {path.name}") from None
        raise ModelError(f"{path} is a link to what does not exist: {os.readlink(path)!r}") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise ModelError(f"{path} is {_KINDS.get(kind, 'something else')}, expected a file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelError(f"{path} has {status.st_size} bytes, expected at most {max_bytes}")
    return status.st_size


@contextlib.contextmanager
def opened(path: Path, max_bytes: int | None = None) -> Generator[BinaryIO, None, None]:
    """Make a context with `path` opened for reading, and checked again after opening. Raises ModelError."""
    check_file(path, max_bytes)
    try:
        # Non-blocking, as a FIFO may have taken the file's place since the check.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{path} is no regular file any more")
            yield file
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises ModelError if the file cannot be read, is too large, or holds anything but an object of moderate
    depth.
    """
    with opened(path, max_bytes) as file:
        content = file.read(max_bytes)
    try:
        value = json.loads(content)
        is_deep = _is_deep(value)
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON: {error}") from None
    if is_deep:
        raise ModelError(f"{path} is nested more than {_MAX_DEPTH} levels deep")
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def _is_deep(value: object, levels: int = _MAX_DEPTH) -> bool:
    if not isinstance(value, dict | list):
        return False
    if not levels:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return any(_is_deep(part, levels - 1) for part in parts)
