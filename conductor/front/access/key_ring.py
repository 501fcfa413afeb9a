"""The API keys that are valid now, from a file that may change at any time.

Owns: reading the file again, finding the key of a header. Does not know: the permissions of keys.
"""

import logging
from collections.abc import Collection
from pathlib import Path

from conductor.front.errors import UnauthorizedError
from conductor.front.http.watching import WatchedFiles
from mooncake.errors import ConfigError
from mooncake.security.api_keys import ApiKey, digest, load_api_keys

_RELOAD_S = 1.0

log = logging.getLogger(__name__)


class KeyRing:
    """The API keys of a file that may change at any time."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if it cannot be used."""
        self._path = path
        self._file = WatchedFiles([path])
        self._keys = load_api_keys(path)
        self._read_at_s = 0.0

    def find(self, authorization: str | None, now_s: float) -> ApiKey:
        """Return the API key in this `Authorization` header; None stands for a request without the header.

        The file is read again first if it has changed, which is checked once a second at most. `now_s` is the
        time of a monotonic clock. Raises UnauthorizedError, whose message does not repeat the header.
        """
        if now_s - self._read_at_s >= _RELOAD_S:
            self._read_at_s = now_s
            self._reload()
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise UnauthorizedError(
                "this server wants an API key: Authorization: Bearer KEY", code="missing_api_key"
            )
        key = self._keys.get(digest(secret.strip()))
        if key is None:
            raise UnauthorizedError("this API key is unknown or has been revoked", code="invalid_api_key")
        return key

    @property
    def keys(self) -> Collection[ApiKey]:
        """The valid keys as of the latest check of the file."""
        return self._keys.values()

    def _reload(self) -> None:
        if self._file.have_changed():
            try:
                self._keys = load_api_keys(self._path)
            except ConfigError as error:  # an editor may be half-way through
                log.error("the API keys stay as they were: %s", error)
            else:
                log.warning("%d API keys are valid now", len(self._keys))
