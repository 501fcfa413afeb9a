"""A client that sends completion requests and times their answers.

Owns: HTTP, the event stream. Does not know: when requests are due, what the times mean together.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.load.prompts import PromptMaker
from benchmarks.tools.load.sources import Planned, Run
from mooncake.messages.costs import tbt_s

API_KEY_VARIABLE = "OPENAI_API_KEY"
"""The environment variable with the server's API key.

No option has the key, because other users of the machine can read command lines.
"""
LOGGED_CHARS = 300
REJECTED = 429


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class AnswerError(Exception):
    """An answer differs from what the request asked for."""


class EventStream:
    """A parser of server-sent events. Their bytes may arrive in any pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of the events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class Answer:
    """One streamed answer as far as it has arrived. Times are of `time.monotonic`.

    An event without token ids counts as one token. At the end `usage` has the true number of tokens. Tokens
    that arrived together in one event have gaps of 0.
    """

    _decode = msgspec.json.Decoder(_Chunk).decode

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.usage: _Usage | None = None
        self.is_complete = False
        self._last_s = 0.0
        self._gaps_s: list[float] = []
        self._num_counted = 0

    def hear(self, payload: bytes, now_s: float) -> None:
        """Record an event. Raises AnswerError."""
        if payload == b"[DONE]":
            self.is_complete = True
            return
        try:
            chunk = self._decode(payload)
        except msgspec.MsgspecError as error:
            raise AnswerError(f"an event that is no completion chunk: {error}") from None
        if chunk.error is not None:
            raise AnswerError(f"the stream ended with an error: {chunk.error}"[:LOGGED_CHARS])
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            if choice.text or choice.token_ids or choice.finish_reason:
                self._count(len(choice.token_ids) if choice.token_ids else 1, now_s)

    def _count(self, num_tokens: int, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self._gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        self._num_counted += num_tokens

    @property
    def num_tokens(self) -> int:
        return self.usage.completion_tokens if self.usage else self._num_counted

    @property
    def gaps_s(self) -> list[float]:
        """The seconds before each token except the first."""
        num_gaps = max(0, self.num_tokens - 1)
        return (self._gaps_s + [0.0] * (num_gaps - len(self._gaps_s)))[:num_gaps]


class Client:
    """A context manager of the connections to one server.

    There are as many connections as requests in flight.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._url = f"{run.url}/v1/completions"
        self._prompts = PromptMaker(run.token_ids, run.seed, run.scale_lengths)

    async def __aenter__(self) -> "Client":
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._run.timeout_s),
            headers={"Content-Type": "application/json", **api_key_header()},
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    def body(self, request: Planned) -> bytes:
        """Return the JSON body of a request.

        To be called before the request is due, because making the body takes time.
        """
        prompt = self._prompts.text(request) if self._run.as_text else self._prompts.tokens(request)
        ignore_eos = {"ignore_eos": True} if self._run.ignore_eos else {}
        return msgspec.json.encode(
            {
                "model": self._run.model,
                "prompt": prompt,
                "max_tokens": request.num_output_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **ignore_eos,
            }
        )

    async def send(self, request: Planned, body: bytes, start_s: float, due_s: float) -> Outcome:
        """Send a request now, and return its outcome, even if the caller is cancelled.

        `start_s` is the beginning of the run, and `due_s` the time at which the request was due, both of
        `time.monotonic`.
        """
        sent_s = time.monotonic()
        answer = Answer()
        kind, error = Kind.FINISHED, ""
        try:
            async with self._http.post(self._url, data=body) as response:
                if response.status != 200:
                    kind = Kind.REJECTED if response.status == REJECTED else Kind.FAILED
                    error = f"{response.status}: {(await response.text())[:LOGGED_CHARS]}"
                else:
                    await self._listen(response.content, answer)
                    self._check(answer, request)
        except asyncio.CancelledError:
            kind = Kind.UNFINISHED  # the run is ended; this was the task's last step
        except TimeoutError:
            kind, error = Kind.FAILED, f"no whole answer within {self._run.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, AnswerError) as failure:
            kind, error = Kind.FAILED, f"{type(failure).__name__}: {failure}"[:LOGGED_CHARS]
        ended_s = time.monotonic()
        usage = answer.usage
        return Outcome(
            number=request.number,
            kind=kind,
            scheduled_s=due_s - start_s,
            num_input_tokens=request.num_input_tokens,
            lag_s=sent_s - due_s,
            answered_s=ended_s - due_s,
            ttft_s=None if answer.first_token_s is None else answer.first_token_s - due_s,
            tbt_s=tbt_s(answer.gaps_s),
            num_output_tokens=answer.num_tokens,
            num_prompt_tokens=usage.prompt_tokens if usage else None,
            num_cached_tokens=_cached(usage),
            error=error,
        )

    async def _listen(self, content: aiohttp.StreamReader, answer: Answer) -> None:
        events = EventStream()
        while data := await content.readany():
            now_s = time.monotonic()
            for payload in events.feed(data):
                answer.hear(payload, now_s)

    def _check(self, answer: Answer, request: Planned) -> None:
        """Check that an answer is complete. Raises AnswerError."""
        if not answer.is_complete or answer.first_token_s is None:
            raise AnswerError(f"the stream ended after {answer.num_tokens} tokens, without [DONE]")
        if self._run.ignore_eos and answer.num_tokens != request.num_output_tokens:
            raise AnswerError(f"expected {request.num_output_tokens} tokens, got {answer.num_tokens}")


def api_key_header() -> dict[str, str]:
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _cached(usage: _Usage | None) -> int | None:
    if usage is None or usage.prompt_tokens_details is None:
        return None
    return usage.prompt_tokens_details.cached_tokens
