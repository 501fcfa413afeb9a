"""Common base of the fields of all bodies: a hostile body must not become a million errors.

A validation error takes kilobytes, and pydantic collects one for each wrong item unless it is told to stop.

Owns: where it stops. Does not know: any field.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_FIELDS = 128
Item = TypeVar("Item")

ListOf = Annotated[list[Item], Field(fail_fast=True)]


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Validator of an integer: 1.0 is one too, JSON has one kind of number."""


class KnownFields(BaseModel):
    """Base of models that take no other fields than their own."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_long", "fewer fields", {"max_length": MAX_FIELDS})
        return value


def at_most(num_entries: int) -> BeforeValidator:
    """Return a validator that bounds an object's entries before it looks at them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_entries:
            raise PydanticCustomError("too_long", "fewer entries", {"max_length": num_entries})
        return value

    return BeforeValidator(check)
