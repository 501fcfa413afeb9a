"""Every error that crosses a boundary of this system, in one small tree.

    MooncakeError
    ├── ConfigError        a key or value in YAML, flags or environment
    ├── ModelError         a checkpoint that cannot be found, read or served
    ├── MismatchError      two sides that must agree and do not (fingerprint, layout, version)
    ├── GrammarError       a grammar that cannot be compiled or followed
    ├── RequestError       a client's request is answered with an error      -> HTTP 4xx, 5xx
    │   └── OverloadedError    no room for it now                            -> HTTP 429 + Retry-After
    ├── PoolError          the KVCache pool refuses an operation
    │   └── PoolFullError      no page is free and none can be evicted
    ├── TransferError      bytes did not reach the other side
    └── NotStoredError     state that is to outlive its process cannot be stored now

ConfigError, ModelError and MismatchError end a process for good (`mooncake.node.process`): a restart would
only repeat them.

A message names the expected and the actual value, and the remedy.
"""

import reprlib

_MAX_REASON_CHARS = 300
_MAX_VALUE_CHARS = 80


class MooncakeError(Exception):
    """The base of all errors that are not programming mistakes."""


def is_panic(error: BaseException) -> bool:
    """Return whether a Rust library has panicked.

    A panic is no Exception, and its class cannot be imported.
    """
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """Return a library's error message in one short line, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(": ")[:_MAX_REASON_CHARS] if lines else type(error).__name__


def shown(value: object) -> str:
    """Return a value from outside as one short line for a message."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."


class ConfigError(MooncakeError):
    """A configuration key is unknown or its value is not acceptable."""


class ModelError(MooncakeError):
    """A model path, file or architecture cannot be served."""


class MismatchError(MooncakeError):
    """Two peers disagree on a value that both must share. The message names both values."""

    def __init__(self, what: str, ours: object, theirs: object, advice: str = "") -> None:
        super().__init__(
            f"{what} differs: ours is {ours}, theirs is {theirs}" + (f"; {advice}" if advice else "")
        )
        self.what, self.ours, self.theirs = what, ours, theirs


class RequestError(MooncakeError):
    """A client's request is answered with an error.

    With most values of `status`, the HTTP status, the request can never succeed as it was sent. With 429 and
    5xx the request may succeed later or elsewhere. `param` is the offending field, `code` OpenAI's
    machine-readable word.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class OverloadedError(RequestError):
    """The cluster cannot take this request now.

    `retry_after_s` is the number of seconds until a retry makes sense.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, status=429, code="overloaded")
        self.retry_after_s = retry_after_s


class GrammarError(MooncakeError):
    """A grammar cannot be compiled, or a text cannot be continued within it."""


class PoolError(MooncakeError):
    """The KVCache pool refused an operation."""


class PoolFullError(PoolError):
    """No page of the pool is free, and none can be evicted.

    `space_epoch`: the evictor's space epoch at the refusal. A caller that waits for a later epoch misses no
    freed page.
    """

    def __init__(self, message: str, space_epoch: int = 0) -> None:
        super().__init__(message)
        self.space_epoch = space_epoch


class TransferError(MooncakeError):
    """A transfer between two messengers failed."""


class NotStoredError(MooncakeError):
    """State that is to outlive its process cannot be stored now.

    The message is for clients: the log has the details.
    """
