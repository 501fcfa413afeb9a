"""A choice's message that may have tool calls, in OpenAI's JSON: whole, and as deltas.

Owns: ids of calls, finish reasons. Does not know: where text comes from, chunks and choices.
"""

import secrets
import string
from collections.abc import Sequence
from typing import Any

from conductor.front.openai.tool_calls import (
    Arguments,
    CallEvent,
    CallStart,
    Text,
    ToolCallParser,
    ToolFormat,
)
from conductor.front.openai.tools import ToolUse
from mooncake.messages.requests import FinishReason

_ID_ALPHABET = string.ascii_letters + string.digits
_MISTRAL_ID_CHARS = 9  # Mistral's chat templates refuse other lengths


class ToolAnswer:
    """The message of one choice, whose text may contain tool calls."""

    def __init__(self, tools: ToolUse) -> None:
        self._tools = tools
        self._parser = ToolCallParser(tools.tool_format, tools.names, tools.max_calls)
        self._events: Sequence[CallEvent] = ()
        self._content: list[str] = []
        self._calls: list[tuple[dict[str, Any], list[str]]] = []
        """Calls, each with the pieces of its arguments so far."""

    def see(self, text: str, finish_reason: FinishReason | None) -> None:
        """Parse new text of the answer. Text with a finish reason is the last text of the answer.

        The caller must call `deltas` or `gather` next.
        """
        events = self._parser.push(text)
        if finish_reason is not None:
            events += self._parser.finish(is_cut=finish_reason is FinishReason.LENGTH)
        # If the answer must consist of calls, text is the beginning of a call that was cut.
        self._events = [event for event in events if not (self._tools.must_call and isinstance(event, Text))]

    @property
    def is_over(self) -> bool:
        """Whether all calls that the answer may have are complete."""
        return self._parser.is_over

    def deltas(self) -> list[dict[str, Any]]:
        """Return the text and calls that the latest `see` has found, as OpenAI's deltas."""
        return [self._delta(event) for event in self._events]

    def gather(self) -> None:
        """Keep the text and calls that the latest `see` has found, for `message`."""
        for event in self._events:
            match event:
                case Text(more):
                    self._content.append(more)
                case CallStart(_, name):
                    self._calls.append((self._call(name), []))
                case Arguments(_, piece):
                    self._calls[-1][1].append(piece)

    def message(self) -> dict[str, Any]:
        """Return the message of all gathered text and calls. Its content is null if there are only calls."""
        content = "".join(self._content)
        calls = []
        for call, pieces in self._calls:
            function = {**call["function"], "arguments": "".join(pieces)}
            calls.append({**call, "function": function})
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return the finish reason that clients expect.

        It is `tool_calls` for an answer that stopped behind complete calls, unless the client has named the
        function.
        """
        has_calls = self._parser.num_calls > 0 and not self._parser.is_within_call
        if reason is FinishReason.STOP and has_calls and not self._tools.is_named:
            return "tool_calls"
        return reason

    def _delta(self, event: CallEvent) -> dict[str, Any]:
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
