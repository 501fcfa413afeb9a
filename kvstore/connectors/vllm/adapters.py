"""The identity of LoRA adapters: a digest of their files, as a name is not unique.

Owns: digests of adapters that were seen. Does not know: who asks.
"""

import hashlib
from pathlib import Path
from typing import Any

_PATTERNS = ("adapter_config.json", "*.safetensors", "*.bin")


class Adapters:
    """The digests of a server's LoRA adapters, by the number that vLLM gives to a loaded adapter."""

    def __init__(self) -> None:
        self._digests: dict[int, str | None] = {}

    def digest(self, lora_request: Any | None) -> str | None:
        """Return the digest of a request's adapter.

        The digest is empty if the request has no adapter, and None if the adapter has no identity: its files
        are not on this host, or it is replaced in place. Blocks of requests with such an adapter are not
        shared.
        """
        if lora_request is None:
            return ""
        if lora_request.load_inplace:
            self._digests[lora_request.lora_int_id] = None
        number = lora_request.lora_int_id
        if number not in self._digests:
            self._digests[number] = directory_digest(Path(lora_request.lora_path))
        return self._digests[number]


def directory_digest(directory: Path) -> str | None:
    """Return the SHA-256 of an adapter's configuration and weights.

    The result is None if a file is unreadable, or if there are fewer than two files.
    """
    digest = hashlib.sha256()
    try:
        files = sorted({path for pattern in _PATTERNS for path in directory.glob(pattern)})
        for path in files:
            with path.open("rb") as content:
                digest.update(f"{path.name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\0".encode())
    except OSError:
        return None
    return digest.hexdigest() if len(files) > 1 else None
