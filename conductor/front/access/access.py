"""Clients' API keys, and the limits of rate and concurrency with which their requests are admitted.

Owns: the check of each request's key, each key's counts and their metrics. Does not know: the file's format
(`mooncake.security.api_keys`), what requests ask for, the routes of admins (`admin_access`).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from conductor.front.access.admin_access import ADMIN_PREFIXES
from conductor.front.access.key_ring import KeyRing
from conductor.front.errors import RateLimitedError, UnauthorizedError, error_response
from conductor.front.metrics import Denial, Metrics
from mooncake.errors import RequestError
from mooncake.messages.fronts import QuotaClaim
from mooncake.security.api_keys import ApiKey

OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready", "/metrics", "/version"})
"""Paths that need no key. They show neither prompts nor answers."""
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "max_context_cache_tokens")
"""Names of a key's attributes that limit its use."""


@dataclass(slots=True)
class _Use:
    """The counts of one key, and the state of its token bucket (`KeyLimits`).

    `num_left` is the number of requests that the key may send at once at the time `at_s`. The number may be a
    fraction, as the bucket is refilled evenly: at 0.5, half the time until the next request has passed.
    Invariant: `0 <= num_left <= max(1, requests_per_minute)`.
    """

    num_left: float
    at_s: float
    num_running: int = 0
    """Choices of the requests with this key that have not ended. A choice counts until its request ends."""
    num_let_in: int = 0
    num_limited: int = 0
    """Requests refused because of a limit of this key."""


class KeyLimits:
    """The counts of each key's requests and choices, and the checks of the key's limits.

    The limit of the rate is a token bucket: the requests of a whole minute may be sent at once, and the
    bucket is refilled evenly. Requests at other fronts are not counted.
    """

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def enter(self, key: ApiKey, now_s: float) -> None:
        """Count a request that begins, with one choice. The caller must call `leave` later.

        Raises RateLimitedError if a limit is exceeded. The request is not counted then, and the caller must
        not call `leave`.
        """
        use = self._uses.setdefault(key.sha256, _Use(_most(key.requests_per_minute), now_s))
        try:
            self._check(use, key, now_s)
        except RateLimitedError:
            use.num_limited += 1
            raise
        use.num_let_in += 1
        use.num_running += 1

    def add_choices(self, key: ApiKey, num_more: int) -> None:
        """Count `num_more` further choices of a request that has begun.

        Raises RequestError for more choices than the key may ever run, RateLimitedError for more than it may
        run now. After an error, the further choices are not counted, and the metrics count the request as
        refused by a limit.
        """
        use, most = self._uses[key.sha256], key.max_concurrent
        if most is not None and use.num_running + num_more > most:
            use.num_let_in -= 1
            use.num_limited += 1
            if num_more >= most:
                raise RequestError(
                    f"{num_more + 1} choices are more than the key {key.name!r} may have at the same time,"
                    f" which are {most}; send several requests",
                    status=403,
                    param="n",
                    code="invalid_value",
                )
            raise RateLimitedError(_running(use.num_running - 1, key), retry_after_s=1.0)
        use.num_running += num_more

    def use_of(self, key: ApiKey) -> _Use | None:
        """Return the counts of a key; None before its first request."""
        return self._uses.get(key.sha256)

    def _check(self, use: _Use, key: ApiKey, now_s: float) -> None:
        rate = key.requests_per_minute
        if key.max_concurrent is not None and use.num_running >= key.max_concurrent:
            raise RateLimitedError(_running(use.num_running, key), retry_after_s=1.0)
        if rate is not None:
            per_second = rate / 60
            use.num_left = min(_most(rate), use.num_left + (now_s - use.at_s) * per_second)
            use.at_s = now_s
            if use.num_left < 1:
                message = f"the key {key.name!r} may send {rate:g} requests a minute"
                raise RateLimitedError(message, retry_after_s=(1 - use.num_left) / per_second)
            use.num_left -= 1

    def leave(self, key: ApiKey, num_choices: int = 1) -> None:
        """Record that a request with `num_choices` choices has ended."""
        self._uses[key.sha256].num_running -= num_choices


def _running(num_running: int, key: ApiKey) -> str:
    return f"{num_running} choices of the key {key.name!r} are running; at most {key.max_concurrent} may"


class KeyUse:
    """One HTTP request's share in the counts of its key, from the request's admission to `end`."""

    def __init__(self, key: ApiKey, limits: KeyLimits, now_s: float) -> None:
        """Admit a request. It counts as one choice until `take` sets the number. Raises RateLimitedError."""
        self.key = key
        self._limits = limits
        self._num_choices = 1
        limits.enter(key, now_s)

    def take(self, num_choices: int) -> None:
        """Set the number of choices of the request. To be called at most once.

        Raises RequestError if the key may never run so many choices, RateLimitedError if the key may not run
        them now.
        """
        self._limits.add_choices(self.key, num_choices - 1)
        self._num_choices = num_choices

    def claim(self, num_tokens: int) -> QuotaClaim | None:
        """Return an answer's claim on the tenant's quota; None if the key limits neither tokens nor choices.

        `num_tokens` is the number of tokens of all prompts of the answer. Raises RequestError if these are
        more than the key may use in a minute.
        """
        per_minute, most = self.key.tokens_per_minute, self.key.max_concurrent
        if per_minute is None and most is None:
            return None
        if per_minute is not None and num_tokens > per_minute:
            raise RequestError(
                f"the prompts have {num_tokens} tokens, and the key {self.key.name!r} may use"
                f" {per_minute:g} a minute; send shorter ones",
                status=403,
                code="invalid_value",
            )
        use = self._limits.use_of(self.key)
        return QuotaClaim(per_minute, most, 0 if use is None else use.num_running, num_tokens)

    def end(self) -> None:
        """Stop counting the request. To be called when no part of the request runs any more."""
        self._limits.leave(self.key, self._num_choices)


def _most(requests_per_minute: float | None) -> float:
    """Return the number of requests that may be sent at once: at least one, however low the rate is."""
    return max(requests_per_minute or 0.0, 1.0)


class AccessControl:
    """ASGI middleware that admits requests with a valid key within the key's limits.

    An admitted request has its `KeyUse` in `request.state.key_use`. Requests for paths that need no client's
    key pass without a check.
    """

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
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        try:
            now_s = self._now()
            key = self._ring.find(None if header is None else header.decode("latin-1"), now_s)
            use = KeyUse(key, self._limits, now_s)
        except RequestError as error:
            is_unknown = isinstance(error, UnauthorizedError)
            self._metrics.request_denied(Denial.NO_KEY if is_unknown else Denial.LIMIT)
            await error_response(error)(scope, receive, send)
            return
        try:
            scope["state"]["key_use"] = use
            await self._app(scope, receive, send)
        finally:
            use.end()


def _is_open(path: str) -> bool:
    """Return whether the path needs no client's key.

    Admin routes need none, as they check admins' keys themselves.
    """
    return path in OPEN_PATHS or path.startswith(ADMIN_PREFIXES)


class AccessMetrics(Collector):
    """The limits and use of each API key as Prometheus metrics, collected at each scrape.

    Registers itself.
    """

    def __init__(self, ring: KeyRing, limits: KeyLimits, registry: CollectorRegistry) -> None:
        self._ring, self._limits = ring, limits
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all keys that were in the file at its latest check."""
        allowed = GaugeMetricFamily(
            "mooncake_api_key_limit", "Limits that a key's entry sets", labels=["key", "limit"]
        )
        running = GaugeMetricFamily(
            "mooncake_api_key_running", "Choices of a key's HTTP requests that run now", labels=["key"]
        )
        requests = CounterMetricFamily(
            "mooncake_api_key_requests",
            "HTTP requests of a key that were let in, and those that were beyond its limits",
            labels=["key", "outcome"],
        )
        for key in self._ring.keys:
            for limit in _LIMITS:
                if (value := getattr(key, limit)) is not None:
                    allowed.add_metric([key.name, limit], value)
            use = self._limits.use_of(key)
            running.add_metric([key.name], 0 if use is None else use.num_running)
            requests.add_metric([key.name, "let_in"], 0 if use is None else use.num_let_in)
            requests.add_metric([key.name, "limited"], 0 if use is None else use.num_limited)
        yield from (allowed, running, requests)
