"""The messages of a conversation, in the form that chat templates expect.

Owns: roles, content parts, tool calls and their answers. Does not know: templates, tokens.
"""

from collections.abc import Sequence
from typing import Any

from conductor.front.openai.schema import Message, shortened
from mooncake.errors import RequestError


def rendered_messages(messages: Sequence[Message], num_before: int = 0) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect, with their content as text.

    The first `num_before` messages come from a context cache. Raises RequestError, whose text counts messages
    from the first one that is not from the cache.
    """
    rendered = []
    names_of_calls: dict[str, str] = {}
    for index, message in enumerate(messages, start=-num_before):
        path = f"messages[{index}]"
        # OpenAI renamed "system" for its own models; templates know the old name.
        role = "system" if message.role == "developer" else message.role
        calls = message.tool_calls or []
        if calls and role != "assistant":
            raise _misplaced(f"{path}.tool_calls", "an assistant's message")
        if message.tool_call_id is not None and role != "tool":
            raise _misplaced(f"{path}.tool_call_id", "a tool's message")
        content = message.content
        entry: dict[str, Any] = {
            "role": role,
            "content": "" if content is None and calls else _text(content, f"{path}.content"),
        }
        name = message.name
        if calls:
            entry["tool_calls"] = [
                call.rendered(f"{path}.tool_calls[{number}]") for number, call in enumerate(calls)
            ]
            names_of_calls |= {call.id: call.function.name for call in calls}
        if role == "tool":
            if message.tool_call_id is None:
                where = f"{path}.tool_call_id"
                raise RequestError(f"{where} is required", param=where, code="missing_required_parameter")
            entry["tool_call_id"] = message.tool_call_id
            name = name or names_of_calls.get(message.tool_call_id)
        if name is not None:
            entry["name"] = name
        rendered.append(entry)
    return rendered


def index_of_tool_use(messages: Sequence[Message]) -> int | None:
    """Return the index of the first message that has tool calls or answers one; None if there is none."""
    return next(
        (i for i, message in enumerate(messages) if message.tool_calls or message.role == "tool"), None
    )


def _misplaced(path: str, place: str) -> RequestError:
    return RequestError(f"{path} is only allowed in {place}", param=path, code="invalid_value")


def _text(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    if not isinstance(content, list):
        raise RequestError(
            f"{path}: expected a string or a list of text parts", param=path, code="invalid_value"
        )
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"{where}: expected an object with a type", param=where, code="invalid_value")
        if kind != "text":
            raise RequestError(
                f"{where}: parts of type {shortened(kind)!r} are not supported by this server, only 'text'",
                param=where,
                code="unsupported_content",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(
                f"{where}.text: expected a string", param=f"{where}.text", code="invalid_value"
            )
        texts.append(text)
    return "\n".join(texts)
