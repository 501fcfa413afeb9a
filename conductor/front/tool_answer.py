"""An assistant's message that may have tool calls, in OpenAI's JSON: whole, and as deltas.

Owns: ids of calls, finish reasons. Does not know: where text comes from, chunks and choices.
"""

import secrets
import string
from collections.abc import Sequence
from typing import Any

from conductor.front.tool_calls import Arguments, CallStart, Event, Text, ToolCallParser, ToolFormat
from conductor.front.tools import ToolUse
from mooncake.requests import FinishReason

_ID_ALPHABET = string.ascii_letters + string.digits
_MISTRAL_ID_CHARS = 9  # its templates refuse others


class ToolAnswer:
    """Of one choice."""

    def __init__(self, tools: ToolUse) -> None:
        self._tools = tools
        self._parser = ToolCallParser(tools.tool_format, tools.names, tools.max_calls)

    def deltas(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """What `text` adds to the message."""
        return [self._delta(event) for event in self._events(text, is_last)]

    def message(self, text: str) -> dict[str, Any]:
        """The message of the whole `text`. Content is null if there is none beside calls."""
        content, calls = "", list[dict[str, Any]]()
        for event in self._events(text, is_last=True):
            match event:
                case Text(more):
                    content += more
                case CallStart(_, name):
                    calls.append(self._call(name))
                case Arguments(_, piece):
                    calls[-1]["function"]["arguments"] += piece
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """`reason` as clients expect it. An answer that stopped within a call has none to be made."""
        has_calls = self._parser.num_calls > 0 and not self._parser.is_within_call
        if reason is FinishReason.STOP and has_calls and not self._tools.is_named:
            return "tool_calls"
        return reason

    def _events(self, text: str, is_last: bool) -> Sequence[Event]:
        events = self._parser.push(text)
        return [*events, *self._parser.finish()] if is_last else events

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Text(text):
                return {"content": text}
            case CallStart(number, name):
                return {"tool_calls": [{"index": number, **self._call(name)}]}
            case Arguments(number, piece):
                return {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}

    def _call(self, name: str) -> dict[str, Any]:
        return {"id": self._new_id(), "type": "function", "function": {"name": name, "arguments": ""}}

    def _new_id(self) -> str:
        if self._tools.tool_format is ToolFormat.MISTRAL:
            return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_MISTRAL_ID_CHARS))
        return f"call_{secrets.token_hex(12)}"
