"""API keys of clients: a file of their hashes and limits.

A key is 256 random bits, so a plain SHA-256 does not give it away. Deleting a key's entry revokes the key.

Owns: the file's format, making keys. Does not know: HTTP, how requests are counted
(`conductor.front.access.access`).
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mooncake.errors import ConfigError
from mooncake.yaml_errors import what_is_wrong

_PREFIX = "mck-"
_SECRET_BYTES = 32
_HEAD = """\
# API keys of mooncake-serve. Only hashes are here: who has lost a key needs a new one.
# To revoke a key delete its entry; the server reads this file again when it changes.
"""


class ApiKey(BaseModel):
    """An entry of the file of API keys. An absent limit is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=1 << 53)] | None = None
    """Tokens of prompts and outputs a minute, at all fronts together."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Choices that run at the same time, at all fronts together."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """The lowest priority number that requests may ask for, and the default of requests that ask for none.

    Absent: 0, and requests may also name any SLO class, even one with a negative priority.
    """
    max_context_cache_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens in context caches at most; default: `http.context_cache_tokens`."""
    cache_group: Annotated[str, Field(pattern=r"^[^\x00]{1,128}$")] | None = None
    """The group of keys that share their KVCache; by default each key has its own."""

    @property
    def salt(self) -> str:
        """The salt that separates the KVCache of this key, or of its group, from all others."""
        return f"key:{self.sha256}" if self.cache_group is None else f"group:{self.cache_group}"


LIMITS: dict[str, tuple[Callable[[str], float], str]] = {
    "requests_per_minute": (float, "no more (default: any number)"),
    "tokens_per_minute": (int, "of prompts and outputs, no more (default: any number)"),
    "max_concurrent": (int, "at the same time (default: any number)"),
    "max_context_cache_tokens": (int, "in context caches (default: http.context_cache_tokens)"),
}
"""The limits of a new key: the parser of each, and its help text."""

_KEYS = TypeAdapter(list[ApiKey])


def digest(key: str) -> str:
    """Return the hexadecimal digest by which the file names a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_api_keys(path: Path) -> dict[str, ApiKey]:
    """Return the entries of the file by the digests of their keys.

    Raises ConfigError that names the fault.
    """
    return _parsed(path, _read(path))


def add_api_key(path: Path, name: str, limits: Mapping[str, float | None]) -> str:
    """Make a new key, add its entry to the file (created if absent), and return the key. Raises ConfigError.

    Limits of `LIMITS` that are None or missing are left out.
    """
    is_new = not path.exists()
    text = _HEAD if is_new else _read(path)
    if any(key.name == name for key in _parsed(path, text).values()):
        raise ConfigError(
            f"{path} has a key {name!r} already; delete its entry first, or choose another name"
        )
    secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    entry: dict[str, object] = {"name": name, "sha256": digest(secret)}
    entry |= {field: value for field, value in limits.items() if value is not None}
    added = ("" if text.endswith("\n") else "\n") + yaml.safe_dump([entry], sort_keys=False)
    _parsed(path, text + added)
    try:
        # Appended, so that comments stay; one write, so that a server never reads half an entry.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + added if is_new else added)
    except OSError as error:
        raise ConfigError(f"cannot write the API keys {path}: {error.strerror}") from None
    return secret


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(
            f"cannot read the API keys {path}: {error.strerror}; make the first one with:"
            f" mooncake-serve apikey {path} NAME"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}") from None


def _parsed(path: Path, text: str) -> dict[str, ApiKey]:
    try:
        content = yaml.safe_load(text)
        keys = _KEYS.validate_python([] if content is None else content)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {what_is_wrong(error)}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place or 'the list'}: {first['msg']}") from None
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) < len(keys):
            raise ConfigError(f"{path}: two entries have the same {field}")
    return {key.sha256: key for key in keys}
