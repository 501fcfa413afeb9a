"""A server starts with its worker, and has ended when the worker goes on."""

import asyncio
from pathlib import Path

import pytest

from mooncake.config.settings import Config
from mooncake.messages.workers import Role
from mooncake.node.process import STOP_DEADLINE_S
from mooncake.node.process_config import WorkerProcess
from mooncake.node.supervisor import STOP_GRACE_S
from mooncake.security.keys import ClusterKey
from tests.deadline import DEADLINE_S
from workers.vllm.guard import GRACE_S
from workers.vllm.processes import processes
from workers.vllm.server import running


def process(command: Path) -> WorkerProcess:
    config = {"engine": "vllm", "model": "/m", "vllm": {"command": str(command)}}
    return WorkerProcess(
        cluster_key=ClusterKey.generate(),
        config=Config.model_validate(config),
        role=Role.DECODE,
        instance="decode-0",
        incarnation=1,
        messenger_socket=str(command.parent / "m"),
        modules_socket=str(command.parent / "h"),
        num_local_workers=1,
    )


async def test_a_server_that_has_not_started_ends_before_its_worker_does(tmp_path: Path) -> None:
    command, started = tmp_path / "vllm", tmp_path / "pid"
    command.write_text(
        "#!/bin/sh\n"
        "trap 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; exit' TERM\n"  # its end takes some time
        f"echo $$ > {started}\n"
        "sleep 1000 & wait\n"
    )
    command.chmod(0o700)

    async def start() -> None:
        async with running(process(command)):
            raise AssertionError("the command answers nothing")

    starting = asyncio.create_task(start())
    async with asyncio.timeout(DEADLINE_S):
        while not (started.exists() and started.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert int(started.read_text()) not in [of.pid for of in processes()]


def test_each_process_has_time_to_wait_for_the_end_of_those_that_it_started() -> None:
    assert GRACE_S < STOP_DEADLINE_S < STOP_GRACE_S
