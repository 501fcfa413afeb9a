"""Errors as clients see them: OpenAI's body, a status, and when to retry.

Code that catches an error in order to send it to the client drops the error's traceback. If a frame of the
traceback refers to the error, the two form a cycle, which would keep the request in memory until the garbage
collector runs.

Owns: the error body and its types, and the front's own errors. Does not know: causes of errors.
"""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from mooncake.errors import OverloadedError, RequestError

RETRY_AFTER_S = 1.0


class UnavailableError(RequestError):
    """The error of a request that the cluster cannot serve now, and may serve later.

    `retry_after_s` is the number of seconds until a retry makes sense.
    """

    def __init__(self, message: str, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(message, status=503, code="unavailable")
        self.retry_after_s = retry_after_s


class RateLimitedError(OverloadedError):
    """The error of a request whose API key has used up its limits. Other keys' requests may be served."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.code = "rate_limit_exceeded"


class UnauthorizedError(RequestError):
    """The error of a request without a valid key.

    `challenge` is the `WWW-Authenticate` header of the response.
    """

    def __init__(self, message: str, code: str, challenge: str = "Bearer") -> None:
        super().__init__(message, status=401, code=code)
        self.challenge = challenge


class GenerationFailedError(RequestError):
    """The error (status 500) of an accepted request that the cluster could not finish."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, code="generation_failed")


def tokens_in_words(num_tokens: int) -> str:
    """Return the number of tokens with its noun: "1 token", "2 tokens"."""
    return f"{num_tokens} token{'' if num_tokens == 1 else 's'}"


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the error as OpenAI's error object."""
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status >= 500:
        kind = "server_error"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """Return the HTTP response for the error, with `headers` added."""
    headers = dict(headers or {})
    if isinstance(error, OverloadedError | UnavailableError):
        # Whole seconds, rounded up: the header has no fractions, and too early a retry is refused again.
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = error.challenge
    return Response(msgspec.json.encode(error_body(error)), error.status, headers, "application/json")
