"""The loop of the Conductor's process: the part of a turn of the event loop that its own front has."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from conductor.process import service
from conductor.process.service import ConductorService
from mooncake.bus.in_process import Inbox, InProcessLink
from mooncake.leadership.terms import Term
from mooncake.messages.fronts import Cancel, FromFront

NUM_MESSAGES = 20


class SlowConductor:
    """A Conductor that decides nothing, and takes `message_s` for each message."""

    instances = SimpleNamespace(num_changes=0)

    def __init__(self, message_s: float) -> None:
        self._message_s = message_s
        self.num_handled = 0

    def handle(self, _sender: bytes, _message: FromFront, now_s: float) -> list[Any]:
        self.num_handled += 1
        while time.monotonic() < now_s + self._message_s:
            pass
        return []


@pytest.mark.parametrize(
    ("message_s", "slice_s", "num_turns"), [(0.0, 60.0, 1), (0.002, 0.001, NUM_MESSAGES)]
)
async def test_messages_of_the_own_front_have_a_slice_of_each_turn(
    monkeypatch: pytest.MonkeyPatch, message_s: float, slice_s: float, num_turns: int
) -> None:
    monkeypatch.setattr(service, "_OWN_FRONT_S", slice_s)
    conductor: Any = SlowConductor(message_s)
    history: Any = SimpleNamespace(observe=lambda *_: None)
    router: Any = None
    follower: Any = None
    inbox = Inbox[FromFront]()
    front = InProcessLink(Inbox[Any](), inbox)
    serving = ConductorService(conductor, router, front, follower, history, Term(1))
    for number in range(NUM_MESSAGES):
        inbox.put_nowait(Cancel(f"r{number}", 0))
    hearing = asyncio.create_task(serving._hear_own_front())
    for _ in range(num_turns):
        assert conductor.num_handled < NUM_MESSAGES
        await asyncio.sleep(0)
    assert conductor.num_handled == NUM_MESSAGES
    hearing.cancel()
