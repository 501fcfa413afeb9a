"""One HTTP request's way through the cluster: its choices, from submission to the last token.

Owns: the choices' texts, counts and ends, and the cancellation of choices that are not wanted any more. Does
not know: HTTP, the answer's format, where the tokens come from.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from conductor.front.generation.http_span import HttpSpan
from conductor.front.generation.link import Link
from conductor.front.generation.reception import Lost, Receive, Received
from conductor.front.generation.recording import Recorder
from conductor.front.generation.request_log import RequestLog
from conductor.front.generation.text import TextStream
from conductor.front.metrics import Metrics
from conductor.front.openai.model import ServedModel
from conductor.front.requests.validation import Job
from mooncake.errors import OverloadedError
from mooncake.messages.fronts import QuotaClaim
from mooncake.messages.requests import FinishReason, Request, SamplingParams, TokenLogprobs


class Delta(msgspec.Struct, frozen=True):
    """New output of one choice. `text` may be empty; `token_ids` are the tokens that `Usage` counts.

    `logprobs` and `offsets` are empty unless the client wants logprobs. `offsets` has for each token the
    index of its first character in the choice's text.
    """

    choice_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: Sequence[TokenLogprobs] = ()
    offsets: Sequence[int] = ()


_MAX_TOKENS_AT_ONCE = 1 << 16
"""The most prompt tokens that are submitted in one turn of the event loop."""


class Usage(NamedTuple):
    """The numbers of tokens of an HTTP request; each prompt counts once, however many choices it has."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


@dataclass(slots=True)
class _Choice:
    """The state of one choice. `last_s` is the time of its latest tokens; None before its first token.

    `gaps_s`: seconds between the choice's iterations.
    """

    index: int
    request: Request
    text: TextStream
    num_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_s: float = 0.0
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)


class Generation:
    """The choices of one HTTP request. `arrived_s` is the event loop's time at which the request arrived."""

    def __init__(
        self,
        job: Job,
        model: ServedModel,
        link: Link,
        metrics: Metrics,
        request_log: RequestLog,
        recorder: Recorder | None,
        arrived_s: float,
        span: HttpSpan | None = None,
    ) -> None:
        self._job, self._link, self._metrics, self._arrived_s = job, link, metrics, arrived_s
        self._request_log, self._recorder, self._span = request_log, recorder, span
        self._lost: Lost | None = None
        self._now = asyncio.get_running_loop().time
        context = None if span is None else span.context
        self._model = model
        self._unsubmitted = deque(enumerate(job.requests(link.reply_to, context)))
        """The choices that have not been submitted, with their indices, in order."""
        if span is not None:
            span.submitted(job)
        self._running: dict[str, _Choice] = {}
        self._num_prompt_tokens = job.num_prompt_tokens
        self._num_cached: dict[int, int] = {}
        """The cached tokens of each prompt: the least number among the prompt's choices.

        A later choice may find blocks that the first choice has stored, and then has a larger number.
        """
        self._num_completion_tokens = 0
        self._is_closed = False

    async def begin(self, receive: Receive) -> None:
        """Submit the first choice. `receive` is called with the events of all choices. Raises RequestError.

        `go_on` must be called at the event `Accepted`. If no `Accepted` is to come, the further choices are
        submitted here.

        The generation must be closed (`aclosing`), even after an error, to cancel choices that still run.
        """
        if not await self._submit(receive, self._job.claim, len(self._unsubmitted)):
            await self.go_on(receive)

    async def go_on(self, receive: Receive) -> None:
        """Submit the further choices. Raises RequestError."""
        num_tokens = 0
        while self._unsubmitted:
            num_more_tokens = len(self._unsubmitted[0][1].token_ids)
            num_tokens += num_more_tokens
            if num_tokens > _MAX_TOKENS_AT_ONCE:
                await asyncio.sleep(0)
                num_tokens = num_more_tokens
            await self._submit(receive)

    async def _submit(self, receive: Receive, claim: QuotaClaim | None = None, num_choices: int = 1) -> bool:
        """Submit the next choice, and return whether further ones must wait, as `Link.submit` does."""
        index, request = self._unsubmitted[0]
        must_wait = await self._link.submit(request, receive, claim, num_choices)
        self._unsubmitted.popleft()
        text = _text_of(request.sampling, self._job, self._model)
        self._running[request.request_id] = _Choice(index, request, text)
        if self._recorder is not None:
            self._recorder.began(request)
        self._metrics.choice_submitted()
        return must_wait

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return not self._running and not self._unsubmitted

    def gain(self, event: Received | Lost) -> Delta | None:
        """Return the new output in `event`, the next event of a choice. Raises the error of a `Lost`.

        Returns None if the choice had ended already, as at a stop string, while the event was in flight. If
        the output has a finish reason, the choice has ended, and the caller must call `end`.
        """
        choice = self._running.get(event.request_id)
        if choice is None:
            return None
        if isinstance(event, Lost):
            self._lost = event
            if isinstance(event.error, OverloadedError):
                self._metrics.choice_rejected(self._now() - self._arrived_s)
            if event.error.param == "grammar" and self._job.grammar is not None:
                event.error.param = self._job.grammar.field
            raise event.error
        plain = choice.text.plain
        if plain is None or event.finish_reason is not None:
            return self._advance(choice, event)
        self._count(choice, len(event.token_ids), event.num_cached_tokens)
        return Delta(choice.index, plain.push(event.token_ids), event.token_ids, None)

    async def end(self, request_id: str, reason: FinishReason) -> None:
        """Record that a choice has all of its tokens, and cancel its request, which may still run."""
        choice = self._running.pop(request_id)
        await self._link.cancel(request_id)
        self._metrics.choice_ended(started=True)
        latency_s = self._now() - self._arrived_s
        self._metrics.choice_finished(reason, latency_s, choice.ttft_s, choice.gaps_s)
        self._log(choice, reason.value)

    async def aclose(self) -> None:
        """Cancel the choices that still run, and count the prompts in the metrics. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id, choice in self._running.items():
            await self._link.cancel(request_id)
            self._metrics.choice_ended(started=choice.last_s is not None)
            is_lost = self._lost is not None and self._lost.request_id == request_id
            self._log(choice, str(self._lost.error) if self._lost is not None and is_lost else "aborted")
        self._running.clear()
        if self._span is not None:
            self._span.used(*self.usage())
        for prompt_index, num_cached in self._num_cached.items():
            self._metrics.prompt_received(len(self._job.prompts[prompt_index].token_ids), num_cached)
            if self._job.cache_use is not None:
                self._job.cache_use.count(prompt_index, num_cached, self._link.prefill_costs)

    def usage(self) -> Usage:
        """Return the token counts so far."""
        return Usage(
            self._num_prompt_tokens,
            sum(self._num_cached.values()),
            self._num_completion_tokens,
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
        # The token that ended the choice has no text. Its offset is the end of the text.
        offsets = [*decoded.offsets, choice.text.num_chars][: len(logprobs)]
        return Delta(choice.index, text, token_ids, finish_reason, logprobs, offsets)

    def _count(self, choice: _Choice, num_tokens: int, num_cached_tokens: int) -> None:
        now_s, gap_s = self._now(), None
        if choice.last_s is None:
            # A later attempt finds blocks that the first one has stored. The first one's number is shown.
            choice.num_cached_tokens = num_cached_tokens
            prompt = choice.index // self._job.num_choices_per_prompt
            self._num_cached[prompt] = min(num_cached_tokens, self._num_cached.get(prompt, num_cached_tokens))
            choice.ttft_s = now_s - self._arrived_s
            self._metrics.choice_started(choice.ttft_s)
        else:
            gap_s = now_s - choice.last_s
            choice.gaps_s.append(gap_s)
        self._metrics.tokens_received(num_tokens, gap_s)
        self._num_completion_tokens += num_tokens
        choice.num_tokens += num_tokens
        choice.last_s = now_s

    def _log(self, choice: _Choice, how: str) -> None:
        if self._recorder is not None:
            self._recorder.ended(choice.request.request_id, choice.num_tokens)
        self._request_log.ended(
            choice.request.request_id,
            how,
            num_prompt_tokens=len(choice.request.token_ids),
            num_cached_tokens=choice.num_cached_tokens,
            num_tokens=choice.num_tokens,
            ttft_s=None if choice.last_s is None else choice.ttft_s,
            gaps_s=choice.gaps_s,
        )
        if self._span is not None:
            first_s = None if choice.last_s is None else self._arrived_s + choice.ttft_s
            self._span.choice_ended(choice.index, how, first_s, choice.last_s)


def _text_of(sampling: SamplingParams, job: Job, model: ServedModel) -> TextStream:
    wants_logprobs = sampling.num_logprobs is not None
    # The mark of calls may be a special token.
    hides_special_tokens = job.tools is None or model.special_token(job.tools.tool_format.begin) is None
    detokenizer = model.new_detokenizer(hides_special_tokens)
    return TextStream(detokenizer, job.stops, sampling.min_tokens, counts_offsets=wants_logprobs)
