"""Instances that compute nothing, with a real Conductor and a real front's link."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.front.instant_workers import InstantInstance
from conductor.effects import ToConductor
from conductor.front.generation.link import Link
from conductor.front.generation.reception import Event, Received
from conductor.policy import Conductor
from conductor.process.event_follower import EventFollower
from conductor.process.service import ConductorService
from conductor.settings import Limits, PolicySettings
from conductor.telemetry.history import History
from mooncake.bus.in_process import Inbox, InProcessLink
from mooncake.bus.zeromq import Router
from mooncake.leadership.terms import Term
from mooncake.messages.blocks import KVLayout
from mooncake.messages.fronts import FromFront
from mooncake.messages.requests import FinishReason, Request, SamplingParams
from mooncake.messages.workers import STAGES
from mooncake.security.keys import ClusterKey
from tests.deadline import DEADLINE_S

FINGERPRINT = "f" * 32
LAYOUT = KVLayout(2, 1, 8, 16, "float32")


async def tokens_of(inbox: Inbox[Event]) -> list[int]:
    token_ids: list[int] = []
    while True:
        event = await inbox.get()
        assert isinstance(event, Received), event
        token_ids += event.token_ids
        if event.finish_reason is not None:
            assert event.finish_reason is FinishReason.LENGTH
            return token_ids


async def cluster_answers(folder: Path, has_inlining: bool) -> tuple[list[list[int]], int]:
    """The answers to two requests, and how many requests the Conductor then still has."""
    key = ClusterKey.generate()
    control, replies = f"ipc://{folder}/control", f"ipc://{folder}/replies"
    conductor = Conductor(1, FINGERPRINT, Limits(), PolicySettings(has_inlining=has_inlining))
    router: Router[ToConductor] = Router(control, ToConductor, key)
    from_front, to_front = Inbox[FromFront](), Inbox[Any]()
    link = Link(InProcessLink(from_front, to_front), replies, key, FINGERPRINT, LAYOUT.block_size, DEADLINE_S)
    follower = EventFollower(conductor.prefixes, key)
    own_front = InProcessLink(to_front, from_front)
    service = ConductorService(conductor, router, own_front, follower, History(), Term(1))
    instances = [InstantInstance(role, role, FINGERPRINT, LAYOUT, control, key, []) for role in STAGES]
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        runs = (service.run(), link.run(), *(one.run() for one in instances))
        tasks = [group.create_task(run) for run in runs]
        for instance in instances:
            await instance.is_registered.wait()
        while link.cluster is None:
            await asyncio.sleep(0.01)
        inboxes = [Inbox[Event](), Inbox[Event]()]
        for index, inbox in enumerate(inboxes):
            sampling = SamplingParams(max_tokens=5 + index)
            await link.submit(Request(f"r{index}", [7, 8, 9], [], sampling, link.reply_to), inbox.put_nowait)
        answers = [await tokens_of(inbox) for inbox in inboxes]
        while conductor.num_open:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
    follower.close()
    router.close()
    return answers, conductor.num_open


@pytest.mark.parametrize("has_inlining", [False, True])
def test_every_request_gets_its_tokens_and_ends(tmp_path: Path, has_inlining: bool) -> None:
    answers, num_running = asyncio.run(cluster_answers(tmp_path, has_inlining))
    assert answers == [[7, 8, 9, 7, 8], [7, 8, 9, 7, 8, 9]]
    assert num_running == 0
