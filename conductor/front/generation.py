"""One HTTP request's way through the cluster: its choices, from submission to the last token.

Owns: the choices' texts, counts and ends, and that nothing goes on when nobody wants it any more.
Does not know: HTTP, the answer's format, where the tokens come from.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from conductor.front.link import Link
from conductor.front.metrics import Metrics
from conductor.front.model import ServedModel
from conductor.front.reception import Event, Lost, Receive, Received
from conductor.front.text import TextStream
from conductor.front.validation import Job
from mooncake.errors import OverloadedError
from mooncake.requests import FinishReason, Request, SamplingParams, TokenLogprobs


class Delta(msgspec.Struct, frozen=True):
    """What one choice has gained. `text` may be empty; `token_ids` are those that `usage` counts.

    If logprobs are wanted: those of each token, and where in the choice's text it begins, in characters.
    """

    choice_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: Sequence[TokenLogprobs] = ()
    offsets: Sequence[int] = ()


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    logprobs = [of_token for delta in deltas for of_token in delta.logprobs]
    offsets = [offset for delta in deltas for offset in delta.offsets]
    return Delta(deltas[-1].choice_index, text, token_ids, deltas[-1].finish_reason, logprobs, offsets)


class Usage(NamedTuple):
    """Tokens of a whole HTTP request; each prompt counts once, however many choices it has."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


@dataclass(slots=True)
class _Choice:
    """`last_s` is the time of its latest tokens; None: none yet. `gaps_s` lie between its steps."""

    index: int
    request: Request
    text: TextStream
    num_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_s: float = 0.0
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)


class Generation:
    """The choices of one job. `arrived_s` is the loop's time at which its HTTP request came."""

    def __init__(self, job: Job, model: ServedModel, link: Link, metrics: Metrics, arrived_s: float) -> None:
        self._job, self._link, self._metrics, self._arrived_s = job, link, metrics, arrived_s
        self._now = asyncio.get_running_loop().time
        self._choices = {
            request.request_id: _Choice(index, request, _text_of(request.sampling, job, model))
            for index, request in enumerate(job.requests(link.reply_to))
        }
        self._running: dict[str, _Choice] = {}
        self._is_closed = False

    async def begin(self, receive: Receive) -> None:
        """Submit all choices; what comes for them goes to `receive`. Raises RequestError.

        Must be closed (`aclosing`), also when it has raised: that cancels the choices that still run.
        """
        for request_id, choice in self._choices.items():
            await self._link.submit(choice.request, receive)
            self._running[request_id] = choice
            self._metrics.choice_submitted()

    @property
    def is_over(self) -> bool:
        """Every choice has ended."""
        return not self._running

    def gain(self, event: Event) -> Delta | None:
        """What a choice has gained with `event`, the next that was received. Raises RequestError.

        None: the choice had ended by a stop string, and this was on its way. With a finish reason it has
        ended, and `end` is to follow.
        """
        choice = self._running.get(event.request_id)
        if choice is None:
            return None
        if isinstance(event, Lost):
            if isinstance(event.error, OverloadedError):
                self._metrics.choice_rejected(self._now() - self._arrived_s)
            raise event.error
        plain = choice.text.plain
        if plain is None or event.finish_reason is not None:
            return self._advance(choice, event)
        self._count(choice, len(event.token_ids), event.num_cached_tokens)
        return Delta(choice.index, plain.push(event.token_ids), event.token_ids, None)

    async def end(self, request_id: str, reason: FinishReason) -> None:
        """A choice has all of its tokens."""
        choice = self._running.pop(request_id)
        await self._link.cancel(request_id)
        self._metrics.choice_ended(started=True)
        latency_s = self._now() - self._arrived_s
        self._metrics.choice_finished(reason, latency_s, choice.ttft_s, choice.gaps_s)

    async def aclose(self) -> None:
        """Nobody wants more of it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id, choice in self._running.items():
            await self._link.cancel(request_id)
            self._metrics.choice_ended(started=choice.last_s is not None)
        self._running.clear()
        for prompt_index, prompt in enumerate(self._job.prompts):
            if any(choice.last_s is not None for choice in self._choices_of(prompt_index)):
                num_cached = self._num_cached(prompt_index)
                self._metrics.prompt_received(len(prompt.token_ids), num_cached)
                if self._job.cache_use is not None:
                    self._job.cache_use.count(prompt_index, num_cached, self._link.prefill_costs)

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            self._job.num_prompt_tokens,
            sum(self._num_cached(index) for index in range(len(self._job.prompts))),
            sum(choice.num_tokens for choice in self._choices.values()),
        )

    def _advance(self, choice: _Choice, event: Received) -> Delta:
        token_ids, finish_reason = event.token_ids, event.finish_reason
        ended_by_token = (
            finish_reason is FinishReason.STOP
            and bool(token_ids)
            and token_ids[-1] in choice.request.sampling.stop_token_ids
        )
        decoded = choice.text.push(token_ids[:-1] if ended_by_token else token_ids)
        text = decoded.text
        if decoded.stopped:
            token_ids, finish_reason = token_ids[: decoded.num_tokens], FinishReason.STOP
        elif finish_reason is not None:
            rest = choice.text.flush()
            text += rest.text
            finish_reason = FinishReason.STOP if rest.stopped else finish_reason
        self._count(choice, len(token_ids), event.num_cached_tokens)
        if not event.logprobs:
            return Delta(choice.index, text, token_ids, finish_reason)
        logprobs = event.logprobs[: len(token_ids)]
        # The token that ended the choice has no text: it begins where that ends.
        offsets = [*decoded.offsets, choice.text.num_chars][: len(logprobs)]
        return Delta(choice.index, text, token_ids, finish_reason, logprobs, offsets)

    def _count(self, choice: _Choice, num_tokens: int, num_cached_tokens: int) -> None:
        now_s, gap_s = self._now(), None
        if choice.last_s is None:
            # A later attempt finds what the first one computed; the client is told of the first.
            choice.num_cached_tokens = num_cached_tokens
            choice.ttft_s = now_s - self._arrived_s
            self._metrics.choice_started(choice.ttft_s)
        else:
            gap_s = now_s - choice.last_s
            choice.gaps_s.append(gap_s)
        self._metrics.tokens_received(num_tokens, gap_s)
        choice.num_tokens += num_tokens
        choice.last_s = now_s

    def _choices_of(self, prompt_index: int) -> list[_Choice]:
        num = self._job.num_choices_per_prompt
        return list(self._choices.values())[prompt_index * num : (prompt_index + 1) * num]

    def _num_cached(self, prompt_index: int) -> int:
        """The least of the prompt's choices: the others may have found what that one computed."""
        return min(
            (c.num_cached_tokens for c in self._choices_of(prompt_index) if c.last_s is not None), default=0
        )


def _text_of(sampling: SamplingParams, job: Job, model: ServedModel) -> TextStream:
    wants_logprobs = sampling.num_logprobs is not None
    # The mark of calls may be a special token.
    hides_special_tokens = job.tools is None or model.special_token(job.tools.tool_format.begin) is None
    detokenizer = model.new_detokenizer(hides_special_tokens)
    return TextStream(detokenizer, job.stops, sampling.min_tokens, counts_offsets=wants_logprobs)
