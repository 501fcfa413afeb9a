"""The reading of requests' bodies, which must not delay other requests.

Bodies of up to `MAX_BRIEF_BYTES` are read in the event loop, if they make no long prompts. All other bodies
are read by two other processes: one reads bodies of up to 256 KiB, the other one reads longer bodies.

Owns: which bodies are read where, the messages to and from the processes of `offload`. Does not know: HTTP,
how bodies are read (`validation`, `tokenization`, `context_beginnings`), who owns a context cache.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from conductor.front.caches.beginning import Beginning
from conductor.front.errors import RETRY_AFTER_S
from conductor.front.openai.body import ReceivedBody
from conductor.front.openai.model import ServedModel
from conductor.front.requests.context_beginnings import NewBeginning, read_beginning
from conductor.front.requests.grammars import WantedGrammar
from conductor.front.requests.offload import Offload, Queue
from conductor.front.requests.task_process import TaskResult
from conductor.front.requests.tokenization import AboutTokens, answer_about_tokens, check_num_ids
from conductor.front.requests.turns import ReadingOrder
from conductor.front.requests.validation import (
    ApiEndpoint,
    CacheWantedError,
    Job,
    KeyedPrompt,
    is_brief,
    job_of,
    read_job,
    read_request,
)
from mooncake.errors import GrammarError, OverloadedError, RequestError
from mooncake.messages.blocks import KEY_BYTES
from mooncake.security.api_keys import ApiKey

MAX_BRIEF_BYTES = 8192
"""The most bytes of a body that is read in the event loop.

Reading a longer body there takes milliseconds, and would delay all streams by as much.
"""
_MAX_SHORT_BYTES = 1 << 18
"""The most bytes of a body that is read in the process for short bodies (`Queue.SHORT`)."""
_MAX_WAITING_GRAMMARS = 16
"""The most grammars of one API key that wait to be compiled."""
_MAX_GRAMMARS_KEPT = 32

FindCache = Callable[[str], Beginning]
"""A function that returns the content of the context cache with an id or name. It raises RequestError."""


class _JobTask(NamedTuple):
    endpoint: ApiEndpoint
    key: ApiKey | None
    cache: Beginning | None


class _BeginningTask(NamedTuple):
    key: ApiKey | None


class _TokensTask(NamedTuple):
    kind: AboutTokens


class Reading:
    """The reader of one front's bodies. Needs a running event loop.

    The processes that read bodies and compile grammars work only while `run` runs.
    """

    def __init__(
        self,
        model: ServedModel,
        served_model_name: str,
        max_choices: int,
        must_wait: Callable[[], bool],
    ) -> None:
        """Fork the first process of `offload`.

        No other thread may run now: the child would wait for ever for a lock that such a thread holds.
        `must_wait` returns whether bodies that are read in the event loop have to wait.
        """
        self._model, self._name, self._max_choices = model, served_model_name, max_choices
        self._offload = Offload(
            {Queue.SHORT: self._read, Queue.LONG: self._read, Queue.GRAMMAR: self._compile}
        )
        self._order = ReadingOrder(must_wait)
        self._good_grammars = OrderedDict[str, None]()

    async def run(self) -> None:
        """Run the processes that read bodies until cancelled. Raises as `Offload.run` does."""
        await self._offload.run()

    def close(self) -> None:
        """End the processes that read bodies. Idempotent."""
        self._offload.close()

    async def job(
        self, endpoint: ApiEndpoint, body: ReceivedBody, key: ApiKey | None, find_cache: FindCache
    ) -> Job:
        """Return the job in `body`, after checking that its grammar compiles. Raises RequestError.

        Context caches are looked up in this process, as the processes that read bodies have none. If a body
        turns out to name a cache, the body is read again, with the cache's content.
        """
        cache = None
        if await self._may_read_here(body, key):
            request = read_request(endpoint, body.whole(), self._model, self._name)
            if is_brief(request):
                return await self._checked(job_of(request, self._model, self._max_choices, key), key)
            if request.context_cache is not None:
                cache = find_cache(request.context_cache)
        answer = await self._ask(_JobTask(endpoint, key, cache), body, key)
        if isinstance(answer.value, CacheWantedError):
            cache = find_cache(answer.value.name)
            answer = await self._ask(_JobTask(endpoint, key, cache), body, key)
        return await self._checked(await _unpacked(answer.value, answer.parts), key)

    async def beginning(self, body: ReceivedBody, key: ApiKey | None) -> NewBeginning:
        """Return the content of a new context cache. Raises RequestError."""
        if await self._may_read_here(body, key):
            return read_beginning(body.whole(), self._model, self._name, key)
        answer = await self._ask(_BeginningTask(key), body, key)
        new: NewBeginning = answer.value
        return new._replace(job=await _unpacked(new.job, answer.parts))

    async def about_tokens(self, kind: AboutTokens, body: ReceivedBody, key: ApiKey | None) -> bytes:
        """Return the answer to `/tokenize` or `/detokenize`, in JSON. Raises RequestError."""
        if kind is AboutTokens.DETOKENIZE:
            check_num_ids(body, self._model)
        if await self._may_read_here(body, key):
            answer = answer_about_tokens(kind, body.whole(), self._model, self._name, only_brief=True)
            if answer is not None:
                return answer
        [data] = (await self._ask(_TokensTask(kind), body, key)).parts
        return data

    async def _may_read_here(self, body: ReceivedBody, key: ApiKey | None) -> bool:
        """Return whether a body is short enough to be read in the event loop.

        For such a body this waits until the body's turn has come.
        """
        if len(body) > MAX_BRIEF_BYTES:
            return False
        await self._order.turn(_tenant(key), len(body))
        return True

    async def _ask(self, task: Any, body: ReceivedBody, key: ApiKey | None) -> TaskResult:
        queue = Queue.SHORT if len(body) <= _MAX_SHORT_BYTES else Queue.LONG
        return await self._offload.do(queue, task, _tenant(key), body.pieces)

    async def _checked(self, job: Job, key: ApiKey | None) -> Job:
        if job.grammar is not None:
            await self._check(job.grammar, key)
        return job

    async def _check(self, grammar: WantedGrammar, key: ApiKey | None) -> None:
        good = self._good_grammars
        if grammar.text in good:
            good.move_to_end(grammar.text)
            return
        tenant = _tenant(key)
        if (num_waiting := self._offload.num_waiting(Queue.GRAMMAR, tenant)) >= _MAX_WAITING_GRAMMARS:
            raise OverloadedError(f"{num_waiting} grammars wait to be compiled", RETRY_AFTER_S)
        try:
            await self._offload.do(Queue.GRAMMAR, grammar.text, tenant)
        except GrammarError as error:
            raise RequestError(
                f"{grammar.field}: {error}", param=grammar.field, code="invalid_schema"
            ) from None
        good[grammar.text] = None
        if len(good) > _MAX_GRAMMARS_KEPT:
            good.popitem(last=False)

    # -- in other processes ---------------------------------------------------------------------------

    def _read(self, task: _JobTask | _BeginningTask | _TokensTask, body: bytes) -> TaskResult:
        model, name = self._model, self._name
        match task:
            case _JobTask(endpoint, key, cache):
                try:
                    job = read_job(endpoint, body, model, name, self._max_choices, key, cache)
                except CacheWantedError as wanted:
                    return TaskResult(wanted)
                return TaskResult(*_packed(job))
            case _BeginningTask(key):
                new = read_beginning(body, model, name, key)
                head, parts = _packed(new.job)
                return TaskResult(new._replace(job=head), parts)
            case _TokensTask(kind):
                answer = answer_about_tokens(kind, body, model, name)
                assert answer is not None, "it may have any length"
                return TaskResult(None, [answer])

    def _compile(self, text: str, _body: bytes) -> TaskResult:
        self._model.grammars.compile(text)
        return TaskResult(None)


def _tenant(key: ApiKey | None) -> str:
    return "" if key is None else key.sha256


def _packed(job: Job) -> tuple[Job, Sequence[bytes]]:
    """Return the job without its prompts and, for each prompt, the bytes of its token ids and of its keys."""
    parts = []
    for prompt in job.prompts:
        parts += [array("I", prompt.token_ids).tobytes(), b"".join(prompt.keys)]
    return msgspec.structs.replace(job, prompts=[]), parts


async def _unpacked(job: Job, parts: Sequence[bytes]) -> Job:
    """Return the whole job, from the two results of `_packed`.

    Other tasks of the event loop run between two prompts, as prompts may have millions of tokens.
    """
    prompts = []
    for ids, keys in zip(parts[::2], parts[1::2], strict=True):
        token_ids = array("I")
        token_ids.frombytes(ids)
        starts = range(0, len(keys), KEY_BYTES)
        prompts.append(KeyedPrompt(token_ids.tolist(), [keys[start : start + KEY_BYTES] for start in starts]))
        await asyncio.sleep(0)
    return msgspec.structs.replace(job, prompts=prompts)
