"""What a worker says first when the life before has ended."""

import asyncio
from pathlib import Path

import pytest

from mooncake.bus.zeromq import Router
from mooncake.config.settings import Config
from mooncake.leadership.leaders import Leader, Leaders
from mooncake.messages.requests import Ref
from mooncake.messages.workers import FromWorker, Returning, ReturnNoted, Role
from mooncake.node.lives import ProcessEnd
from mooncake.node.process_config import WorkerProcess
from mooncake.security.keys import ClusterKey
from workers.process import returning
from workers.process.returning import say_returning

KEY = ClusterKey.generate()
LEFT = [Ref(1, "r", 2)]


def process(previous_end: ProcessEnd | None) -> WorkerProcess:
    return WorkerProcess(
        cluster_key=KEY,
        config=Config(),
        role=Role.DECODE,
        instance="decode-0",
        incarnation=8,
        messenger_socket="",
        modules_socket="",
        num_local_workers=1,
        previous_end=previous_end,
    )


@pytest.mark.parametrize(
    ("end", "left", "said"),
    [
        (ProcessEnd.FAILED, LEFT, LEFT),
        (ProcessEnd.FAILED, None, None),
        (ProcessEnd.KILLED, LEFT, []),
        (ProcessEnd.KILLED, None, []),
    ],
)
async def test_whose_pass_it_was_is_said_of_a_life_that_failed_and_of_no_other(
    short_tmp_path: Path, end: ProcessEnd, left: list[Ref] | None, said: list[Ref] | None
) -> None:
    router: Router[FromWorker] = Router(f"ipc://{short_tmp_path}/conductor", FromWorker, KEY)
    async with asyncio.TaskGroup() as group:
        saying = group.create_task(say_returning(process(end), Leaders(Leader(router.endpoint)), left))
        sender, message = await router.recv()
        assert message == Returning("decode-0", 8, said)
        assert not saying.done(), "it waits until that is heard"
        await router.send(sender, ReturnNoted())
    router.close()


async def test_a_first_life_says_nothing_and_nobody_waits_for_a_conductor_that_is_gone(
    short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaders = Leaders(Leader(f"ipc://{short_tmp_path}/nobody"))
    await say_returning(process(None), leaders, LEFT)
    monkeypatch.setattr(returning, "ANSWER_TIMEOUT_S", 0.1)
    await say_returning(process(ProcessEnd.FAILED), leaders, LEFT)
    await say_returning(process(ProcessEnd.FAILED), Leaders(), LEFT)
