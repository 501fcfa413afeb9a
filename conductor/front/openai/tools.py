"""The tools that a chat request offers to the model, and the ways in which the model may use them.

Owns: the fields `tools`, `tool_choice`, `parallel_tool_calls`, calls in messages, the description of tools
for models whose chat template has no place for them. Does not know: how calls are found in text
(`tool_calls`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from conductor.front.openai.fields import KnownFields
from conductor.front.openai.tool_calls import ToolFormat
from mooncake.errors import RequestError

MAX_TOOLS = 128
_NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"
_INTRODUCTION = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The text that describes tools to Hermes models."""


class FunctionFields(KnownFields):
    """The fields of a function that the model may call; `parameters` is its JSON schema."""

    name: Annotated[str, Field(pattern=_NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, SkipValidation[Any]] | None = None
    strict: bool | None = None


class ToolFields(KnownFields):
    """An entry of a chat request's `tools`."""

    type: Literal["function"]
    function: FunctionFields


class NamedFunction(KnownFields):
    """The name of a function that must be called."""

    name: str


class NamedTool(KnownFields):
    """The form of `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(BaseModel):
    """A function that an assistant has called; `arguments` is JSON."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: Annotated[str, Field(pattern=_NAME_PATTERN)]
    arguments: str


class ToolCallFields(BaseModel):
    """An entry of an assistant message's `tool_calls`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self, path: str) -> dict[str, Any]:
        """Return the call in the form for templates, with its arguments as an object. Raises RequestError."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            where = f"{path}.function.arguments"
            raise RequestError(f"{where}: expected a JSON object", param=where, code="invalid_value")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request. `functions` are the functions that may be called.

    With `must_call` the answer must consist of calls. With `is_named` the answer must be one call of the
    function that the client has named. `max_calls` is the most calls of the answer; None for any number.
    """

    tool_format: ToolFormat
    functions: tuple[FunctionFields, ...]
    must_call: bool
    is_named: bool
    max_calls: int | None

    @property
    def names(self) -> list[str]:
        """The names of all functions."""
        return [function.name for function in self.functions]

    def bare(self) -> "ToolUse":
        """Return a copy with the functions' names only, without the client's descriptions and schemas."""
        return replace(self, functions=tuple(FunctionFields(name=name) for name in self.names))


def tool_use(
    tools: Sequence[ToolFields],
    tool_choice: object,
    parallel_tool_calls: bool | None,
    tool_format: ToolFormat | None,
) -> ToolUse | None:
    """Return the tools of a request and their use; None if the answer cannot contain calls.

    Raises RequestError.
    """
    functions = {tool.function.name: tool.function for tool in tools}
    if len(functions) < len(tools):
        raise RequestError("tools: two functions have the same name", param="tools", code="invalid_value")
    named = _named_by(tool_choice)
    if not tools and (named is not None or tool_choice == "required"):
        raise RequestError("tool_choice needs tools", param="tool_choice", code="invalid_value")
    if not tools or tool_choice == "none":
        return None
    if named is not None and named not in functions:
        raise RequestError(
            f"tool_choice: {named!r} is none of the tools", param="tool_choice", code="invalid_value"
        )
    if tool_format is None:
        raise RequestError(
            "this model's chat template is not known to take tools; start the server with --http-tool-parser"
            " hermes, llama3_json or mistral, as the model writes calls, or leave tools out",
            param="tools",
            code="unsupported_parameter",
        )
    must_call = named is not None or tool_choice == "required"
    # A model that may write nothing but calls repeats a call where it would rather write text.
    is_single = named is not None or parallel_tool_calls is False or (must_call and not parallel_tool_calls)
    return ToolUse(
        tool_format,
        tuple(functions.values()) if named is None else (functions[named],),
        must_call=must_call,
        is_named=named is not None,
        max_calls=1 if is_single else None,
    )


def _named_by(tool_choice: object) -> str | None:
    """Return the function that `tool_choice` names; None if it names none. Raises RequestError."""
    match tool_choice:
        case None | "none" | "auto" | "required":
            return None
        case {"type": "function", "function": {"name": str(name), **more}, **rest} if not more and not rest:
            return name
        case _:
            raise RequestError(
                'tool_choice: expected "none", "auto", "required" or'
                ' {"type": "function", "function": {"name": ...}}',
                param="tool_choice",
                code="invalid_value",
            )


def rendered_tools(tools: Sequence[ToolFields]) -> list[dict[str, Any]]:
    """Return tools as the JSON objects that chat templates expect."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


def describe_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages for a chat template that has no place for tools.

    The system message describes the tools. Tool calls and their answers become text in messages of the
    assistant and the user.
    """
    described = [_plain(message) for message in messages]
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if described and described[0]["role"] == "system":
            described[0]["content"] += f"\n\n{text}"
        else:
            described.insert(0, {"role": "system", "content": text})
    return described


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    plain["content"] = "\n".join([*([plain["content"]] if plain["content"] else []), *calls])
    return plain
