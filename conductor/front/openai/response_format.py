"""The field `response_format`: an answer in JSON.

Owns: its fields. Does not know: how an answer is held to them (`grammars`).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from conductor.front.openai.fields import KnownFields


class JsonSchemaFields(KnownFields):
    """`strict` or not, the answer is what `schema` describes."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, SkipValidation[Any]], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(KnownFields):
    """`json_object` or `json_schema`; `text` asks for nothing."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None
