"""OpenAI's answers: whole, and as chunks of an event stream.

Owns: the JSON of answers. Does not know: where text comes from, how it is sent.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from conductor.front.generation import logprobs
from conductor.front.generation.generation import Delta, Usage
from conductor.front.generation.tool_answer import ToolAnswer
from conductor.front.openai.model import ServedModel
from conductor.front.requests.validation import ApiEndpoint, Job, UsageShown
from mooncake.messages.requests import FinishReason

STREAM_END = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_PLACE = "text goes here: " + secrets.token_hex(16)
_LogprobsOf = Callable[[Delta], dict[str, Any] | None]


def event(body: dict[str, Any]) -> bytes:
    """Return `body` as one server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


class AnswerFormat:
    """The format of one answer: one JSON body, or the events of a stream."""

    __slots__ = (
        "_around_text",
        "_base",
        "_chat",
        "_chunk_base",
        "_is_text_alone",
        "_object",
        "_return_token_ids",
        "_token_bytes",
        "_tool_answers",
        "_unstarted",
        "_usage_shown",
        "_whole",
    )

    def __init__(self, job: Job, served_model_name: str, model: ServedModel) -> None:
        self._chat = job.endpoint is ApiEndpoint.CHAT
        self._object = "chat.completion" if self._chat else "text_completion"
        self._usage_shown = job.usage_shown
        self._return_token_ids = job.return_token_ids
        self._tool_answers = {index: ToolAnswer(job.tools) for index in range(len(job.sampling)) if job.tools}
        self._unstarted = set(range(len(job.sampling)))  # choices that have not sent their role
        self._base = {
            "id": job.id,
            "created": int(time.time()),
            "model": served_model_name,
            "system_fingerprint": model.fingerprint[:12],
        }
        self._chunk_base = {**self._base, "object": "chat.completion.chunk" if self._chat else self._object}
        self._whole: dict[int, _WholeChoice] = {}
        """Choices of an answer that is not streamed, by index."""
        self._token_bytes = model.tokenizer.token_bytes
        self._is_text_alone = (
            not self._tool_answers
            and not self._return_token_ids
            and self._usage_shown is not UsageShown.IN_EACH_CHUNK
            and all(params.num_logprobs is None for params in job.sampling)
        )
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """The JSON before and behind the text of an event, by choice.

        Only choices that have begun, and whose events have nothing but text, are in it.
        """

    def seen(self, delta: Delta) -> Delta:
        """Search new output for tool calls, and return the output.

        The returned output has a finish reason if the choice ends with its tool calls. The caller must pass
        the output to `gather` or `chunks` next.
        """
        with_tools = self._tool_answers.get(delta.choice_index)
        if with_tools is None:
            return delta
        with_tools.see(delta.text, delta.finish_reason)
        if with_tools.is_over and delta.finish_reason is None:
            return replace(delta, finish_reason=FinishReason.STOP)
        return delta

    def gather(self, delta: Delta) -> None:
        """Keep the new output of one choice for an answer that is not streamed."""
        choice = self._whole.get(delta.choice_index)
        if choice is None:
            tools = self._tool_answers.get(delta.choice_index)
            choice = self._whole[delta.choice_index] = _WholeChoice(tools, self._logprobs)
        choice.add(delta)

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the JSON of an answer that is not streamed, choice by choice.

        To be called once, when all output has been gathered.
        """
        around = {**self._base, "object": self._object, "choices": [_PLACE], "usage": _usage(usage)}
        head, tail = _encode(around).split(_encode(_PLACE))
        yield head
        for index in range(len(self._whole)):
            choice = self._whole.pop(index)
            content = {"message": choice.message} if self._chat else {"text": choice.text}
            separator = b"," if index else b""
            yield separator + _encode(
                {
                    "index": index,
                    **content,
                    **({"token_ids": choice.token_ids} if self._return_token_ids else {}),
                    "logprobs": choice.logprobs,
                    "finish_reason": self._finish_reason(index, choice.finish_reason),
                }
            )
        yield tail

    def chunks(self, delta: Delta, usage: Callable[[], Usage]) -> bytes:
        """Return the stream's events for `delta`; empty if `delta` shows nothing new.

        `usage` is called for the token counts if the client wants them in each chunk.
        """
        around = self._around_text.get(delta.choice_index)
        if around is not None and delta.finish_reason is None:
            return around[0] + _encode(delta.text) + around[1] if delta.text else b""
        counts = self._counts(usage)
        if self._is_text_alone:
            self._around_text[delta.choice_index] = self._event_around_text(delta.choice_index, counts)
        is_new = bool(delta.text) or self._has_shown_tokens(delta)
        if not self._chat:
            if not is_new and delta.finish_reason is None:
                return b""
            return self._chunk(delta, {"text": delta.text}, counts)
        events = b""
        if delta.choice_index in self._unstarted:
            self._unstarted.remove(delta.choice_index)
            start = replace(_without_tokens(delta), finish_reason=None)
            before = self._counts(usage, num_uncounted=len(delta.token_ids))
            events += self._chunk(start, {"delta": {"role": "assistant", "content": ""}}, before)
        shown = replace(delta, finish_reason=None)
        for message in self._message_deltas(delta, is_new):
            events += self._chunk(shown, {"delta": message}, counts)
            shown = _without_tokens(shown)
        if delta.finish_reason is not None:
            events += self._chunk(_without_tokens(delta), {"delta": {}}, counts)
        return events

    def _event_around_text(self, choice_index: int, counts: dict[str, Any]) -> tuple[bytes, bytes]:
        content = {"delta": {"content": _PLACE}} if self._chat else {"text": _PLACE}
        with_place = self._chunk(Delta(choice_index, _PLACE, [], None), content, counts)
        head, tail = with_place.split(_encode(_PLACE))
        return head, tail

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a stream."""
        if self._usage_shown is UsageShown.NOWHERE:
            return STREAM_END
        return event({**self._chunk_base, "choices": [], "usage": _usage(usage)}) + STREAM_END

    def _message_deltas(self, delta: Delta, is_new: bool) -> list[dict[str, Any]]:
        with_tools = self._tool_answers.get(delta.choice_index)
        if with_tools is None:
            return [{"content": delta.text}] if is_new else []
        deltas = with_tools.deltas()
        # Tokens with a logprob are shown even if their text is held back.
        return deltas or ([{"content": ""}] if self._has_shown_tokens(delta) else [])

    def _has_shown_tokens(self, delta: Delta) -> bool:
        return bool(delta.logprobs) or (self._return_token_ids and bool(delta.token_ids))

    def _counts(self, usage: Callable[[], Usage], num_uncounted: int = 0) -> dict[str, Any]:
        """Return a chunk's `usage` field in a dict; an empty dict if the client did not ask for usage.

        `num_uncounted` is the number of received tokens that no chunk has shown so far.
        """
        if self._usage_shown is UsageShown.NOWHERE:
            return {}
        if self._usage_shown is UsageShown.AT_END:
            return {"usage": None}
        so_far = usage()
        num_shown = so_far.num_completion_tokens - num_uncounted
        return {"usage": _usage(so_far._replace(num_completion_tokens=num_shown))}

    def _chunk(self, delta: Delta, content: dict[str, Any], counts: dict[str, Any]) -> bytes:
        return event({**self._chunk_base, "choices": [self._choice(delta, content)], **counts})

    def _choice(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        token_ids: dict[str, Any] = {"token_ids": delta.token_ids} if self._return_token_ids else {}
        return {
            "index": delta.choice_index,
            **content,
            **token_ids,
            "logprobs": self._logprobs(delta),
            "finish_reason": self._finish_reason(delta.choice_index, delta.finish_reason),
        }

    def _finish_reason(self, choice_index: int, reason: FinishReason | None) -> str | None:
        with_tools = self._tool_answers.get(choice_index)
        return reason if with_tools is None else with_tools.finish_reason(reason)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return the logprobs of new output; None without tokens, or if the client wants none."""
        if not delta.logprobs:
            return None
        return (logprobs.of_chat if self._chat else logprobs.of_completion)(delta, self._token_bytes)


def _without_tokens(delta: Delta) -> Delta:
    return replace(delta, token_ids=[], logprobs=(), offsets=())


class _WholeChoice:
    """A choice of an answer that is not streamed. Its logprobs are encoded while tokens arrive."""

    def __init__(self, tools: ToolAnswer | None, logprobs_of: _LogprobsOf) -> None:
        self._tools, self._logprobs_of = tools, logprobs_of
        self._texts: list[str] = []
        self._logprobs: _Columns | None = None
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Add new output of the choice."""
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
        """The text of a choice without tools."""
        return "".join(self._texts)

    @property
    def message(self) -> dict[str, Any]:
        """The message of a chat completion's choice."""
        if self._tools is not None:
            return self._tools.message()
        return {"role": "assistant", "content": self.text, "refusal": None}

    @property
    def logprobs(self) -> msgspec.Raw | None:
        """The logprobs of the choice as JSON; None if they were not asked for."""
        return None if self._logprobs is None else self._logprobs.json()


class _Columns:
    """A JSON object whose lists grow. Items are encoded when they are added; other values are replaced."""

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
