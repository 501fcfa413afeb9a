"""The order in which TLS handshakes begin."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator

import pytest

from conductor.front.http import handshakes
from conductor.front.http.handshakes import HandshakeTurns


class Clients:
    """Connections whose handshakes wait for their turns, and the turns of the event loop in which they got
    them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._turns, self._stack = HandshakeTurns(), stack
        self.begun: list[int] = []
        self.refused: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, *, speaks: bool, has_gone: bool = False) -> None:
        client, accepted = map(self._stack.enter_context, socket.socketpair())
        accepted.setblocking(False)
        if speaks:
            client.sendall(b"hello")
        if has_gone:
            client.close()
        self.tasks.append(asyncio.create_task(self._wait(len(self.tasks), accepted)))

    async def _wait(self, number: int, accepted: socket.socket) -> None:
        try:
            await self._turns.turn(accepted)
        except ConnectionAbortedError:
            self.refused.append(number)
        else:
            self.begun.append(number)


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    with contextlib.ExitStack() as stack:
        made = Clients(stack)
        yield made
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_a_few_begin_in_each_turn_of_the_event_loop(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "_MAX_AT_ONCE", 2)
    for _ in range(7):
        clients.add(speaks=True)
    nums = [0]
    while len(clients.begun) < 7:
        await asyncio.sleep(0)
        nums.append(len(clients.begun))
    assert max(later - before for before, later in itertools.pairwise(nums)) == 2


async def test_one_that_says_nothing_waits_and_holds_up_none(clients: Clients) -> None:
    clients.add(speaks=False)
    clients.add(speaks=True)
    await clients.tasks[1]
    assert clients.begun == [1]


async def test_the_oldest_is_refused_when_too_many_wait(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_WAITING", 3)
    for _ in range(5):
        clients.add(speaks=True)
    await asyncio.gather(*clients.tasks)
    assert len(clients.refused) == 2
    assert len(clients.begun) == 3


async def test_one_that_has_gone_without_a_word_has_no_turn(clients: Clients) -> None:
    clients.add(speaks=True)
    clients.add(speaks=False, has_gone=True)
    await asyncio.gather(*clients.tasks)
    assert clients.begun == [0]
    assert clients.refused == [1]


async def test_ones_that_have_been_cancelled_do_not_count_as_waiting(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_WAITING", 3)
    monkeypatch.setattr(handshakes, "_MAX_AT_ONCE", 0)
    for _ in range(3):
        clients.add(speaks=True)
    await settle()
    for task in clients.tasks[1:]:
        task.cancel()
    for _ in range(2):
        clients.add(speaks=True)
    await settle()
    monkeypatch.undo()
    await asyncio.gather(*clients.tasks, return_exceptions=True)
    assert clients.refused == []
    assert sorted(clients.begun) == [0, 3, 4]


async def settle() -> None:
    """Let all clients that have sent bytes wait for their turns."""
    for _ in range(10):
        await asyncio.sleep(0)
