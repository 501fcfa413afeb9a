"""The common base of the fields of all bodies, which limits the validation errors of a hostile body.

A validation error takes kilobytes, and pydantic collects one for each wrong item unless it is told to stop.

Owns: the limit of errors. Does not know: any field.
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
"""A validator of integers. 1.0 is valid, too, as JSON has one kind of number."""


class KnownFields(BaseModel):
    """The base of pydantic models that refuse unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_long", "fewer fields", {"max_length": MAX_FIELDS})
        return value


def at_most(num_entries: int) -> BeforeValidator:
    """Return a validator that limits the number of an object's entries before they are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_entries:
            raise PydanticCustomError("too_long", "fewer entries", {"max_length": num_entries})
        return value

    return BeforeValidator(check)
