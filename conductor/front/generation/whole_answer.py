"""One choice of an answer that is not streamed, made as it comes and not all at its end.

Owns: what is kept of each piece. Does not know: what is around choices (`answer`).
"""

from collections.abc import Callable
from typing import Any

import msgspec

from conductor.front.generation.generation import Delta
from conductor.front.generation.tool_answer import ToolAnswer
from mooncake.messages.requests import FinishReason

_encode = msgspec.json.Encoder().encode
LogprobsOf = Callable[[Delta], dict[str, Any] | None]


class WholeChoice:
    """A choice so far."""

    def __init__(self, tools: ToolAnswer | None, logprobs_of: LogprobsOf) -> None:
        self._tools, self._logprobs_of = tools, logprobs_of
        self._texts: list[str] = []
        self._logprobs: _Columns | None = None
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """What has come."""
        self.finish_reason = delta.finish_reason
        self.token_ids += delta.token_ids
        if self._tools is not None:
            self._tools.gather()
        else:
            self._texts.append(delta.text)
        if (columns := self._logprobs_of(delta)) is not None:
            self._logprobs = self._logprobs or _Columns()
            self._logprobs.add(columns)

    @property
    def text(self) -> str:
        """Of a choice without tools."""
        return "".join(self._texts)

    @property
    def message(self) -> dict[str, Any]:
        """Of a chat."""
        if self._tools is not None:
            return self._tools.message()
        return {"role": "assistant", "content": self.text, "refusal": None}

    @property
    def logprobs(self) -> msgspec.Raw | None:
        """In JSON."""
        return None if self._logprobs is None else self._logprobs.json()


class _Columns:
    """An object of lists, each piece in JSON as soon as it comes."""

    def __init__(self) -> None:
        self._lists: dict[str, list[bytes]] = {}
        self._others: dict[str, bytes] = {}

    def add(self, columns: dict[str, Any]) -> None:
        for name, value in columns.items():
            if isinstance(value, list):
                self._lists.setdefault(name, []).append(_encode(value)[1:-1])
            else:
                self._others[name] = _encode(value)

    def json(self) -> msgspec.Raw:
        lists = {name: b"[" + b",".join(pieces) + b"]" for name, pieces in self._lists.items()}
        fields = (_encode(name) + b":" + value for name, value in {**lists, **self._others}.items())
        return msgspec.Raw(b"{" + b",".join(fields) + b"}")
