"""A server that is stopped, or does not answer, gives no load; in the end it counts as lost."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import cast

import httpx
import pytest

from tests.cluster.harness import eventually
from workers.errors import EngineLostError
from workers.vllm.kv_events import KVEventFollower
from workers.vllm.processes import groups_below, members
from workers.vllm.server import EngineLoad, VllmServer

METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{num_gpu_blocks="80"} 1.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 700.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 128.0
"""
SHORT_S = 0.2


@pytest.fixture
async def guard() -> AsyncIterator[asyncio.subprocess.Process]:
    """A guarded process in the place of vLLM's."""
    command = [sys.executable, "-m", "workers.vllm.guard", "sleep", "1000"]
    guard = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    yield guard
    assert guard.stdin is not None
    guard.stdin.close()
    await guard.wait()


def server(
    guard: asyncio.subprocess.Process, hang_timeout_s: float | None, *, answers: bool = True
) -> VllmServer:
    async def answer(_: httpx.Request) -> httpx.Response:
        if not answers:
            await asyncio.Event().wait()
        return httpx.Response(200, text=METRICS)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://vllm")
    return VllmServer(http, guard, cast(KVEventFollower, None), hang_timeout_s)


async def test_a_stopped_process_is_waited_for(guard: asyncio.subprocess.Process) -> None:
    eventually(lambda: bool(groups_below(guard.pid) - {os.getpgrp()}), "the command runs")
    [group] = groups_below(guard.pid)
    os.killpg(group, signal.SIGSTOP)
    eventually(lambda: all(process.is_stopped for process in members(group)), "it is stopped")
    with pytest.raises(EngineLostError, match="vLLM has not answered for"):
        await server(guard, SHORT_S).load()
    loading = asyncio.create_task(server(guard, None).load())
    os.killpg(group, signal.SIGCONT)
    assert await loading == EngineLoad(
        num_running=3, num_waiting=2, kv_usage=0.25, num_pages=80, num_computed_tokens=700
    )


async def test_a_server_that_does_not_answer_is_lost(guard: asyncio.subprocess.Process) -> None:
    with pytest.raises(EngineLostError, match="vLLM has not answered for"):
        await server(guard, SHORT_S, answers=False).load()
