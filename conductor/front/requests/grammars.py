"""The grammars of answers, for `response_format` and for required tool calls.

Owns: the texts of grammars. Does not know: how they are compiled (`mooncake.model.grammar`).
"""

import json
from typing import Any, NamedTuple

from conductor.front.openai.model import ServedModel
from conductor.front.openai.schema import ResponseFormat
from conductor.front.openai.tool_calls import ToolFormat
from conductor.front.openai.tools import ToolUse
from mooncake.errors import RequestError
from mooncake.model.grammar import MAX_GRAMMAR_BYTES

# Without a bound some models write white space for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}", "coerce_one_of": True}


class _Shape(NamedTuple):
    """The text around tool calls. A part for which the model has a special token is written as that token."""

    before_all: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after_all: tuple[str, ...] = ()


_HERMES, _MISTRAL = ToolFormat.HERMES, ToolFormat.MISTRAL
_SHAPES = {
    _HERMES: _Shape(before=(_HERMES.begin, "\n"), after=("\n", _HERMES.end), between=("\n",)),
    ToolFormat.LLAMA3_JSON: _Shape(between=("; ",)),
    _MISTRAL: _Shape(before_all=(_MISTRAL.begin, "["), between=(", ",), after_all=("]",)),
}


class WantedGrammar(NamedTuple):
    """The grammar that an answer must follow. `field` is the request's field that asks for it."""

    text: str
    field: str


def wanted_grammar(
    response_format: ResponseFormat | None, tools: ToolUse | None, model: ServedModel
) -> WantedGrammar | None:
    """Return the grammar of a request; None if the answer may be any text. Raises RequestError."""
    rules, alternatives, field = [], [], "response_format"
    if response_format is not None and (schema := _schema_of(response_format)) is not None:
        alternatives.append("answer")
        rules.append(f"answer: {_json(schema)}")
    if tools is not None and (tools.must_call or alternatives):
        alternatives = ["calls"] if tools.must_call else [*alternatives, "calls"]
        rules = [*([] if tools.must_call else rules), *_call_rules(tools, model)]
        field = "tools" if tools.must_call else field
    if not alternatives:
        return None
    text = "\n".join([f"start: {' | '.join(alternatives)}", *rules]) + "\n"
    if (num_bytes := len(text.encode())) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{field}: the schemas make a grammar of {num_bytes} bytes,"
            f" and at most {MAX_GRAMMAR_BYTES} are allowed",
            param=field,
            code="invalid_schema",
        )
    return WantedGrammar(text, field)


def _schema_of(wanted: ResponseFormat) -> dict[str, Any] | None:
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise RequestError(
            'response_format.json_schema is required with type "json_schema", and with no other',
            param="response_format.json_schema",
            code="invalid_value",
        )
    if wanted.json_schema is not None:
        return wanted.json_schema.schema_
    return {"type": "object"} if wanted.type == "json_object" else None


def _call_rules(tools: ToolUse, model: ServedModel) -> list[str]:
    """Return the grammar rules of `calls`, in the model's format.

    The rules allow one call, or any number from one on if the request does not limit the calls to one.
    """
    shape = _SHAPES[tools.tool_format]
    one = f"{_terms(shape.before, model)} call {_terms(shape.after, model)}"
    more = "" if tools.max_calls == 1 else f"({_terms(shape.between, model)} {one})*"
    rules = [
        f"calls: {_terms(shape.before_all, model)} {one} {more} {_terms(shape.after_all, model)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools.functions))),
    ]
    for number, function in enumerate(tools.functions):
        head = f'{{"name": "{function.name}", "{tools.tool_format.arguments_key}": '
        schema = {"type": "object"} if function.parameters is None else function.parameters
        rules += [
            f'call_{number}: {json.dumps(head)} arguments_{number} "}}"',
            f"arguments_{number}: {_json(schema)}",  # a rule of its own: references are to the schema's root
        ]
    return rules


def _terms(parts: tuple[str, ...], model: ServedModel) -> str:
    tokens = ((model.special_token(part), part) for part in parts)
    return " ".join(json.dumps(part) if token is None else f"<[{token}]>" for token, part in tokens)


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"
