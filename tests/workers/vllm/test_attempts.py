"""What becomes of an attempt that fails."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.errors import MooncakeError, RequestError
from mooncake.messages.requests import Ref, Request, SamplingParams
from mooncake.messages.workers import Reserve, WorkFailed
from workers.errors import AnswerLostError
from workers.execution.jobs import Jobs
from workers.vllm.attempts import Attempts

REF = Ref(1, "r", 1)


async def failure(error: MooncakeError, **sampling: Any) -> WorkFailed:
    """What the Conductor is told of an attempt that ends with `error`."""
    told = list[Any]()

    async def send(message: Any) -> None:
        told.append(message)

    async def work() -> None:
        raise error

    pool: Any = SimpleNamespace(closed=asyncio.Event())
    server: Any = None
    request = Request("r", [1, 2], [], SamplingParams(**{"max_tokens": 3, **sampling}), "ipc://front")
    async with asyncio.TaskGroup() as group:
        attempts = Attempts(server, pool, send, Jobs(group))
        attempts.start(Reserve(REF, request), work)
    [failed] = told
    assert isinstance(failed, WorkFailed)
    return failed


async def test_a_lost_answer_may_be_tried_again_and_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed = await failure(AnswerLostError("vLLM's answer breaks off"))
    assert failed == WorkFailed(REF, "vLLM's answer breaks off", retryable=True)
    assert [record.getMessage() for record in caplog.records] == ["r failed: vLLM's answer breaks off"]


async def test_a_refusal_names_the_field_that_asks_for_too_much() -> None:
    failed = await failure(RequestError("not reached"), presence_penalty=0.5)
    assert (failed.retryable, failed.is_refused, failed.param) == (False, True, "presence_penalty")
