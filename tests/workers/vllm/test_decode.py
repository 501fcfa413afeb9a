"""Answers of vLLM on their way to the front."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

from mooncake.messages.fronts import TokenOutput
from mooncake.messages.pools import Grant
from mooncake.messages.requests import FinishReason, Ref, Request, SamplingParams
from mooncake.messages.workers import Decode, Finished, Prefilled, Reserve, Reserved, WorkFailed
from tests.deadline import DEADLINE_S
from workers.execution.jobs import Jobs
from workers.vllm.attempts import Attempts
from workers.vllm.decode import VllmDecode
from workers.vllm.server import Output


class Pool:
    """A pool in which everything arrives at once."""

    address, closed = "m0", asyncio.Event()
    segment = SimpleNamespace(layout=SimpleNamespace(block_size=32))

    async def reserve(self, *_: object) -> Any:
        return SimpleNamespace(reservation_id=1)

    async def grant(self, _: int) -> Grant:
        return Grant(1, self.address, [])  # type: ignore[arg-type]

    async def wait_arrived(self, _: int) -> None:
        pass

    async def release(self, _: int) -> None:
        pass


async def complete(_request: Request, _tokens: list[int], num_tokens: int) -> AsyncGenerator[Output]:
    for _ in range(num_tokens):
        yield Output([7])
    yield Output([], 0)


def decode_of(
    completes: Callable[..., AsyncGenerator[Output]], told: asyncio.Queue[Any], group: asyncio.TaskGroup
) -> VllmDecode:
    """Return the part of an instance whose engine answers as `completes`."""
    blocks = SimpleNamespace(num_leading_tokens=lambda _: 0)
    server: Any = SimpleNamespace(complete=completes, kv_events=SimpleNamespace(blocks=blocks))
    pool: Any = Pool()

    async def emit(_: list[tuple[str, TokenOutput]]) -> None:
        pass

    return VllmDecode(Attempts(server, pool, told.put, Jobs(group)), DEADLINE_S, emit)


async def test_prompts_are_counted_by_where_they_are_computed() -> None:
    told = asyncio.Queue[Any]()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        decode = decode_of(complete, told, group)
        for number, inline in enumerate((True, False, True)):
            ref = Ref(1, f"r{number}", 1)
            request = Request(ref.request_id, [1, 2], [], SamplingParams(3), "ipc://front")
            decode.reserve(Reserve(ref, request, inline=inline))
            assert isinstance(await told.get(), Reserved)
            if inline:
                assert await told.get() == Prefilled(ref, 7, 0)
            else:
                decode.decode(Decode(ref, 7, 0))
            assert await told.get() == Finished(ref, FinishReason.LENGTH, 3)
    stats = decode.meter.stats
    assert (stats.num_inlined, stats.num_not_inlined) == (2, 1)


async def end_early(_request: Request, _tokens: list[int], _num_tokens: int) -> AsyncGenerator[Output]:
    yield Output([7])


async def test_an_answer_that_ends_early_is_for_another_attempt_and_the_engine_goes_on() -> None:
    told = asyncio.Queue[Any]()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        decode = decode_of(end_early, told, group)
        for number in range(2):
            ref = Ref(1, f"r{number}", 1)
            request = Request(ref.request_id, [1, 2], [], SamplingParams(3), "ipc://front")
            decode.reserve(Reserve(ref, request, inline=True))
            assert isinstance(await told.get(), Reserved)
            assert await told.get() == Prefilled(ref, 7, 0)
            assert await told.get() == WorkFailed(ref, "vLLM ended an answer after 1 tokens", retryable=True)
