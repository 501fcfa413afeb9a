"""A request's body: from bytes to the fields that a schema names.

Owns: parsing JSON, and errors in the terms of JSON. Does not know: what a field means.
"""

import contextlib
import gc
import json
import math
import reprlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from conductor.front.openai.schema import shortened
from mooncake.errors import RequestError

Schema = TypeVar("Schema", bound=BaseModel)
_PIECE_BYTES = 1 << 17

# Pydantic's words are about Python; a client has written JSON.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_pattern_mismatch": "1 to 128 visible ASCII characters",
    "string_too_long": "a shorter string",
    "string_too_short": "at least one character",
    "string_type": "a string",
    "too_short": "at least one item",
}


class ReceivedBody:
    """A received body, kept in pieces. A copy of a large body in one piece would block the event loop."""

    def __init__(self) -> None:
        self.pieces = [bytearray()]
        """The pieces in order.

        All but the last have at least `_PIECE_BYTES`. A piece ends with the added part that has filled it.
        """

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def add(self, part: bytes) -> None:
        if len(self.pieces[-1]) >= _PIECE_BYTES:
            self.pieces.append(bytearray())
        self.pieces[-1] += part

    def count(self, byte: bytes) -> int:
        """Return the number of occurrences of this byte in the body."""
        return sum(piece.count(byte) for piece in self.pieces)

    def whole(self) -> bytes:
        """Return the body as one bytes object, a copy."""
        return b"".join(self.pieces)


@contextlib.contextmanager
def refusing_depth() -> Generator[None, None, None]:
    """Make a context that refuses a body that is nested too deeply.

    The context raises RequestError in place of RecursionError.
    """
    try:
        yield
    except RecursionError:
        raise RequestError("the request body is nested too deeply", code="invalid_json") from None


def parse(
    schema: type[Schema], body: bytes, check: Callable[[Mapping[str, object]], None] | None = None
) -> Schema:
    """Return the JSON object in `body` as a `schema`. Raises RequestError that names the first wrong field.

    `check` gets the plain JSON values before objects are built, to refuse too many values cheaply.
    """
    if not body:
        raise RequestError("the request body is empty; expected a JSON object", code="invalid_json")
    gc.disable()  # the collector would visit the millions of lists of a hostile body again and again
    try:
        with refusing_depth():
            value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if (field := _field_out_of_range(body)) is not None:
            raise RequestError(
                f"{field}: expected a number within the range of 64-bit floats",
                param=field,
                code="invalid_value",
            ) from None
        reason = _invalid_utf8(body) or str(error)
        raise RequestError(f"the request body is not valid JSON: {reason}", code="invalid_json") from None
    finally:
        gc.enable()
    if not isinstance(value, dict):
        raise RequestError("the request body must be a JSON object", code="invalid_json")
    if check is not None:
        check(value)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _first_error(error) from None


class _OutOfRangeError(Exception):
    """The error of a number that is too large. Its argument is the field's name."""


def _field_out_of_range(body: bytes) -> str | None:
    """Return the name of the field with the first number that is too large; None if no such number is found.

    The body is parsed again for this, as the error of the first parser names no field.
    """

    def check(fields: list[tuple[str, Any]]) -> None:
        for name, value in fields:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, float) and not math.isfinite(item):
                    raise _OutOfRangeError(name)

    try:
        json.loads(body, parse_int=float, object_pairs_hook=check)
    except _OutOfRangeError as error:
        return shortened(error.args[0])
    except (ValueError, RecursionError):
        return None
    return None


def _invalid_utf8(body: bytes) -> str | None:
    """Return a text about the body's first invalid UTF-8 byte and its position; None if all bytes are valid.

    The position is searched again, as the parser's error has the position within one string only.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{body[error.start]:02x} at position {error.start} is no UTF-8"
    return None


def _first_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    path = shortened(path)
    if first["type"] == "missing":
        return RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field {path!r}", param=path, code="unknown_parameter")
    if first["type"] == "too_long":
        most, given = first["ctx"]["max_length"], first["input"]
        num = len(given) if isinstance(given, list | dict) else "more"
        return RequestError(
            f"{path or 'the request body'}: at most {most} are allowed, got {num}",
            param=path or None,
            code="array_above_max_length" if isinstance(given, list) else "invalid_value",
        )
    expected = _EXPECTED.get(first["type"]) or first["msg"].removeprefix("Input should be ")
    return RequestError(
        f"{path or 'the request body'}: expected {expected}, got {shortened(reprlib.repr(first['input']))}",
        param=path or None,
        code="invalid_value",
    )
