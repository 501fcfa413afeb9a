"""Who may ask, and how much: API keys, their rates and how many of their requests run at the same time.

Owns: the check of each request's key, each key's counts. Does not know: the file's format
(`mooncake.api_keys`), what is asked.
"""

import base64
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from conductor.front.errors import RateLimitedError, error_response
from conductor.front.metrics import Denial, Metrics
from conductor.front.watching import WatchedFiles
from mooncake.api_keys import ApiKey, digest, load_api_keys
from mooncake.errors import ConfigError, RequestError

PAGE = "/dashboard"
"""browsers ask for its key as for a password, and its polls use nothing up"""
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/metrics", "/version"})
"""what needs no key: they say nothing of what clients ask"""
_RELOAD_S = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Use:
    """Invariant: `0 <= num_left <= max(1, requests_per_minute)`, as of `at_s`."""

    num_left: float
    at_s: float
    num_running: int = 0
    num_let_in: int = 0
    num_limited: int = 0
    """refused, for a limit"""


class KeyLimits:
    """Counts the requests of each key. A rate's whole minute may be used at once, then it fills up evenly."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def enter(self, key: ApiKey, now_s: float) -> None:
        """A request begins; `leave` must follow. Raises RateLimitedError, and then it has not begun."""
        use = self._uses.setdefault(key.sha256, _Use(_most(key.requests_per_minute), now_s))
        try:
            self._check(use, key, now_s)
        except RateLimitedError:
            use.num_limited += 1
            raise
        use.num_let_in += 1
        use.num_running += 1

    def use_of(self, key: ApiKey) -> _Use | None:
        """None before its first request."""
        return self._uses.get(key.sha256)

    def _check(self, use: _Use, key: ApiKey, now_s: float) -> None:
        rate = key.requests_per_minute
        if key.max_concurrent is not None and use.num_running >= key.max_concurrent:
            message = (
                f"{use.num_running} requests of the key {key.name!r} are running, which are all it may have"
            )
            raise RateLimitedError(message, retry_after_s=1.0)
        if rate is not None:
            per_second = rate / 60
            use.num_left = min(_most(rate), use.num_left + (now_s - use.at_s) * per_second)
            use.at_s = now_s
            if use.num_left < 1:
                message = f"the key {key.name!r} may send {rate:g} requests a minute"
                raise RateLimitedError(message, retry_after_s=(1 - use.num_left) / per_second)
            use.num_left -= 1

    def leave(self, key: ApiKey) -> None:
        """A request that has begun is over."""
        self._uses[key.sha256].num_running -= 1


def _most(requests_per_minute: float | None) -> float:
    """Requests that may be sent at once. One, of even the lowest rate."""
    return max(requests_per_minute or 0.0, 1.0)


class KeyRing:
    """The keys in a file that may change at any time."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        self._path = path
        self._file = WatchedFiles([path])
        self._keys = load_api_keys(path)
        self._read_at_s = 0.0

    def find(self, authorization: str | None, now_s: float) -> ApiKey:
        """The key in this header. Raises RequestError, which does not repeat it."""
        if now_s - self._read_at_s >= _RELOAD_S:
            self._read_at_s = now_s
            self._reload()
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise RequestError(
                "this server wants an API key: Authorization: Bearer KEY", status=401, code="missing_api_key"
            )
        key = self._keys.get(digest(secret.strip()))
        if key is None:
            raise RequestError(
                "this API key is unknown or has been revoked", status=401, code="invalid_api_key"
            )
        return key

    @property
    def keys(self) -> Collection[ApiKey]:
        """All that are valid, as the file was when last looked at."""
        return self._keys.values()

    def _reload(self) -> None:
        if self._file.have_changed():
            try:
                self._keys = load_api_keys(self._path)
            except ConfigError as error:  # an editor may be half-way through
                log.error("the API keys stay as they were: %s", error)
            else:
                log.warning("%d API keys are valid now", len(self._keys))


class AccessControl:
    """ASGI: lets requests with a valid key through; `request.state.api_key` is the key."""

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        limits: KeyLimits,
        metrics: Metrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._ring, self._limits, self._metrics, self._now = app, ring, limits, metrics, now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        authorization = None if header is None else header.decode("latin-1")
        if scope["path"] == PAGE or scope["path"].startswith(f"{PAGE}/"):
            await self._show(authorization, scope, receive, send)
            return
        try:
            now_s = self._now()
            key = self._ring.find(authorization, now_s)
            self._limits.enter(key, now_s)
        except RequestError as error:
            self._metrics.request_denied(Denial.NO_KEY if error.status == 401 else Denial.LIMIT)
            headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            await error_response(error, headers)(scope, receive, send)
            return
        try:
            scope["state"]["api_key"] = key
            await self._app(scope, receive, send)
        finally:
            self._limits.leave(key)

    async def _show(self, authorization: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._ring.find(_as_bearer(authorization), self._now())
        except RequestError as error:
            headers = {"www-authenticate": 'Basic realm="mooncake-serve", charset="UTF-8"'}
            await error_response(error, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _as_bearer(authorization: str | None) -> str | None:
    """A browser sends a name, which is of no interest, and the key as the password."""
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, secret = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return None
    return f"Bearer {secret}"
