"""vLLM's server as a child process, and its completions.

The server stores its blocks in the pool of this instance and finds them there (`kvstore.connectors.vllm`),
under the block keys of our requests.

Owns: start and end, fields of completions. Does not know: the command, orders, the Conductor.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from mooncake.errors import RequestError
from mooncake.messages.requests import Request, SamplingParams
from mooncake.node.process import Progress, report
from mooncake.node.process_config import WorkerProcess
from workers.errors import AnswerLostError, EngineLostError
from workers.vllm.command import MODEL, Computing, event_endpoints, serve_command
from workers.vllm.guard import GRACE_S, TRACKER_S
from workers.vllm.kv_events import KVEventFollower
from workers.vllm.processes import groups_below, members
from workers.vllm.pulse import Pulse

_POLL_S = 0.2
_CONNECT_S = 5.0
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_EVENT = "data: "
_END = "data: [DONE]"
_SERVED = {
    *("max_tokens", "min_tokens", "stop_token_ids", "logit_bias"),
    *("temperature", "top_p", "top_k", "min_p", "seed"),
}
"""The fields of `SamplingParams` that `completion_body` passes on."""
_API_NAMES = {"num_logprobs": "logprobs"}
"""The API's names of the served fields that have another name in `SamplingParams`."""
_GRAMMAR = "response_format, or a tool call that needs a grammar,"
"""The API's fields that ask for a grammar, in words for errors about `SamplingParams.grammar`."""


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None
    """The reason why vLLM has given up the answer."""


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of an answer; or, at its end, the number of cached prompt tokens."""

    token_ids: list[int]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of the engine, read from its metrics."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_pages: int = 0
    num_computed_tokens: int = 0
    """The number of prompt tokens that the engine has computed since its start."""


def trace_headers(request: Request) -> dict[str, str]:
    """Return the headers that make vLLM's own spans, if there are any, children of the request's span."""
    if request.span is None:
        return {}
    state = {"tracestate": request.span.tracestate} if request.span.tracestate else {}
    return {"traceparent": request.span.traceparent, **state}


class VllmServer:
    """A vLLM server that answers requests, started by `running`."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        child: asyncio.subprocess.Process,
        kv_events: KVEventFollower,
        hang_timeout_s: float | None,
    ) -> None:
        self.kv_events = kv_events
        self._http, self._child, self._hang_timeout_s = http, child, hang_timeout_s
        self._pulse, self._load = Pulse(hang_timeout_s), EngineLoad()

    async def ended(self) -> None:
        """Wait until the server ends unexpectedly, and raise EngineLostError."""
        status = await self._child.wait()
        raise EngineLostError(f"vLLM has ended with status {status}; its log says why")

    async def complete(
        self, request: Request, token_ids: Sequence[int], num_tokens: int
    ) -> AsyncGenerator[Output]:
        """Yield at most `num_tokens` tokens behind `token_ids`, then the number of cached prompt tokens.

        `request` has the sampling parameters. The server gives the answer up when the iterator is closed.

        Raises RequestError if the server refuses the request. If the server does not complete the answer, the
        error is EngineLostError when the engine is not healthy, and AnswerLostError when it is.
        """
        body = completion_body(request, token_ids, num_tokens)
        clock = asyncio.get_running_loop().time
        self._pulse.asked(clock())
        try:
            async with self._http.stream(
                "POST", "/v1/completions", json=body, headers=trace_headers(request)
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    text = (await answer.aread()).decode(errors="replace")
                    error = RequestError if answer.is_client_error else AnswerLostError
                    raise error(f"vLLM answers {answer.status_code}: {text[:300]}")
                is_complete = False
                async for line in answer.aiter_lines():
                    self._pulse.moved(clock())
                    is_complete |= line == _END
                    if (output := _output_of(line)) is not None:
                        yield output
                if not is_complete:
                    raise AnswerLostError("vLLM's answer breaks off")
        except AnswerLostError as lost:
            await self._raise_lost(str(lost))
        except (httpx.HTTPError, msgspec.MsgspecError) as lost:
            await self._raise_lost(f"vLLM does not answer: {type(lost).__name__} {lost}")
        finally:
            self._pulse.ended()

    async def _raise_lost(self, reason: str) -> NoReturn:
        """Raise AnswerLostError, or EngineLostError if the engine is not healthy."""
        error = AnswerLostError if await _is_ready(self._http) else EngineLostError
        raise error(reason)

    async def load(self) -> EngineLoad:
        """Return the engine's load. Waits until the server answers and none of its processes is paused.

        Raises EngineLostError if that takes longer than `hang_timeout_s`, or if the engine hangs.
        """
        now_s = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                text = (await self._http.get("/metrics")).text
                await self._until_none_is_stopped()
        except TimeoutError:
            raise EngineLostError(f"vLLM has not answered for {self._hang_timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise EngineLostError(f"vLLM does not answer: {type(error).__name__} {error}") from None
        load = _load_of(text)
        if load != self._load:
            self._pulse.moved(now_s())
        self._pulse.check(now_s())
        self._load = load
        return load

    async def _until_none_is_stopped(self) -> None:
        while True:
            # The server's processes are a group below the guard.
            processes = [process for group in groups_below(self._child.pid) for process in members(group)]
            if not any(process.is_stopped for process in processes):
                return
            await asyncio.sleep(_POLL_S)


def _output_of(line: str) -> Output | None:
    """Return the output in a line of an answer; None if the line has none.

    Raises AnswerLostError if the line says that vLLM has given up the answer.
    """
    if not line.startswith(_EVENT) or line == _END:
        return None
    event = msgspec.json.decode(line.removeprefix(_EVENT), type=_Event)
    if event.error is not None:
        raise AnswerLostError(f"vLLM has given up an answer: {event.error.message}")
    if event.choices and event.choices[0].token_ids:
        return Output(event.choices[0].token_ids)
    if event.usage is not None and event.usage.prompt_tokens_details is not None:
        return Output([], event.usage.prompt_tokens_details.cached_tokens)
    return None


def _load_of(text: str) -> EngineLoad:
    """Return the load in a text of Prometheus metrics."""
    values: dict[str, float] = {}
    num_pages = num_computed_tokens = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = sample.value
            if sample.name == "vllm:cache_config_info":
                num_pages = int(sample.labels.get("num_gpu_blocks", "0"))
            elif sample.name == _BY_SOURCE and sample.labels.get("source") == "local_compute":
                num_computed_tokens = int(sample.value)
    return EngineLoad(
        int(values.get("vllm:num_requests_running", 0)),
        int(values.get("vllm:num_requests_waiting", 0)),
        values.get("vllm:kv_cache_usage_perc", 0.0),
        num_pages,
        num_computed_tokens,
    )


def completion_body(request: Request, token_ids: Sequence[int], num_tokens: int) -> dict[str, object]:
    """Return the JSON body of a completion request for at most `num_tokens` tokens behind `token_ids`."""
    sampling, num_drawn = request.sampling, len(token_ids) - request.num_prompt_tokens
    return {
        "model": MODEL,
        "prompt": list(token_ids),
        "max_tokens": num_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "min_tokens": min(num_tokens, max(0, sampling.min_tokens - num_drawn)),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "ignore_eos": True,  # `stop_token_ids` has all tokens that end an answer
        "detokenize": False,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": request.root_key.hex(),
        "kv_transfer_params": {"root_key": request.root_key.hex()},
    }


def check_served(sampling: SamplingParams) -> None:
    """Check that vLLM serves all sampling parameters (docs/vllm.md).

    Raises RequestError, which names the first parameter that vLLM does not serve.
    """
    plain = SamplingParams(sampling.max_tokens)
    for name in SamplingParams.__struct_fields__:
        if name not in _SERVED and getattr(sampling, name) != getattr(plain, name):
            param = _API_NAMES.get(name, name)
            shown = _GRAMMAR if name == "grammar" else param
            raise RequestError(f"{shown} is not served by vLLM's instances", param=param)


logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs each request


@contextlib.asynccontextmanager
async def running(process: WorkerProcess) -> AsyncIterator[VllmServer]:
    """Make a context in which a server runs and answers. All of its processes end with the context.

    Raises EngineLostError if the server ends before it answers.
    """
    port = _free_port()
    computing = Computing.of(process, os.environ)
    command = [sys.executable, "-m", "workers.vllm.guard", *serve_command(process, port, computing)]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, env=os.environ | computing.environment
    )
    assert child.stdin is not None
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    limits = httpx.Limits(max_connections=None)
    kv_events = KVEventFollower(*event_endpoints(process, port), process.config.kvcache.block_size)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=timeout, limits=limits
        ) as http:
            hang_timeout_s = process.config.hang_timeout_s
            server = VllmServer(http, child, kv_events, None if hang_timeout_s == "never" else hang_timeout_s)
            while not await _is_ready(http):
                report(Progress("vLLM starts", 0, 0))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(server.ended(), _POLL_S)
            yield server
    finally:
        try:
            child.stdin.close()
            # Linux cannot end a process that hangs in a driver: such a process is left behind.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), GRACE_S + TRACKER_S + 1)
        finally:
            kv_events.close()


async def _is_ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health", timeout=_CONNECT_S)).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
