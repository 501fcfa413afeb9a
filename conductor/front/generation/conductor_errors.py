"""The errors that clients get when the Conductor ends a request.

Owns: the error for each message of the Conductor that ends a request. Does not know: requests, how errors are
sent.
"""

from conductor.front.errors import (
    RETRY_AFTER_S,
    GenerationFailedError,
    RateLimitedError,
    UnavailableError,
)
from conductor.view.rejection import Reason
from mooncake.errors import OverloadedError, RequestError
from mooncake.messages.fronts import Failed, Rejected


def error_of(ended: Rejected | Failed) -> RequestError:
    """Return the error for the client of a request that was rejected or has failed."""
    match ended:
        case Rejected():
            return _rejection(ended)
        case Failed(is_refused=True, message=message, param=param):
            code = None if param is None else "unsupported_parameter"
            return RequestError(message, param=param, code=code)
        case Failed(message=message, may_retry=True):
            return UnavailableError(message)
    return GenerationFailedError(ended.message)


def _rejection(rejected: Rejected) -> RequestError:
    retry_after_s = RETRY_AFTER_S if rejected.retry_after_s is None else rejected.retry_after_s
    if rejected.status == 429:
        is_quota = rejected.reason in (Reason.MAX_CONCURRENT, Reason.TOKENS_PER_MINUTE)
        return (RateLimitedError if is_quota else OverloadedError)(rejected.message, retry_after_s)
    if rejected.status == 503:
        return UnavailableError(rejected.message, retry_after_s)
    return RequestError(rejected.message, status=rejected.status)
