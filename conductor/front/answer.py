"""OpenAI's answers: whole, and as chunks of an event stream.

Owns: the JSON of answers. Does not know: where text comes from, how it is sent.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from conductor.front.generation import Delta, Usage
from conductor.front.validation import Endpoint, Job
from mooncake.messages import FinishReason

STREAM_END = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(body: dict[str, Any]) -> bytes:
    """`body` as one server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


class AnswerFormat:
    """The answers to one job."""

    __slots__ = ("_base", "_chat", "_include_usage", "_object", "_unstarted")

    def __init__(self, job: Job, served_model_name: str, fingerprint: str) -> None:
        self._chat = job.endpoint is Endpoint.CHAT
        self._object = "chat.completion" if self._chat else "text_completion"
        self._include_usage = job.include_usage
        self._unstarted = set(range(len(job.sampling)))  # choices that have not sent their role
        self._base = {
            "id": job.id,
            "created": int(time.time()),
            "model": served_model_name,
            "system_fingerprint": fingerprint[:12],
        }

    def whole(self, texts: Sequence[str], reasons: Sequence[FinishReason], usage: Usage) -> bytes:
        """The answer that is not streamed; `texts` and `reasons` are in the order of the choices."""
        choices: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            content: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self._chat
                else {"text": text}
            )
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason})
        return _encode({**self._base, "object": self._object, "choices": choices, "usage": _usage(usage)})

    def chunks(self, delta: Delta) -> bytes:
        """The events of `delta`; none if it shows nothing new."""
        if not self._chat:
            if not delta.text and delta.finish_reason is None:
                return b""
            return self._chunk(delta.choice_index, {"text": delta.text}, delta.finish_reason)
        events = b""
        if delta.choice_index in self._unstarted:
            self._unstarted.remove(delta.choice_index)
            events += self._chunk(delta.choice_index, {"delta": {"role": "assistant", "content": ""}}, None)
        if delta.text:
            events += self._chunk(delta.choice_index, {"delta": {"content": delta.text}}, None)
        if delta.finish_reason is not None:
            events += self._chunk(delta.choice_index, {"delta": {}}, delta.finish_reason)
        return events

    def end(self, usage: Usage) -> bytes:
        """The last events of a stream."""
        if not self._include_usage:
            return STREAM_END
        return event({**self._chunk_base(), "choices": [], "usage": _usage(usage)}) + STREAM_END

    def _chunk(self, index: int, content: dict[str, Any], reason: FinishReason | None) -> bytes:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return event({**self._chunk_base(), "choices": [choice], **usage})

    def _chunk_base(self) -> dict[str, Any]:
        return {**self._base, "object": "chat.completion.chunk" if self._chat else self._object}
