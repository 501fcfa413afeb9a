"""Listening before falling asleep: when it is tried, and that nobody is missed meanwhile."""

import asyncio
import functools
import itertools
import os
import socket
import threading
from collections.abc import Coroutine
from typing import Any

from messenger.transport.listening import ListeningLoop, Patience, hears, others_wait
from tests.deadline import DEADLINE_S

LISTEN_S = 300e-6


def _run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test

    with asyncio.Runner(loop_factory=functools.partial(ListeningLoop, LISTEN_S)) as runner:
        runner.run(bounded())


class Clock:
    """Stands still but for those who listen."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def in_vain(self) -> bool:
        """What comes again and again is not what is listened for."""
        self.now_s += 0.4 * LISTEN_S
        return False

    def silence(self, within_s: float) -> bool:
        """Nothing comes in that time."""
        self.now_s += within_s
        return False

    def held_up(self, within_s: float) -> bool:
        """Something comes, and others have the processor until after that time."""
        self.now_s += within_s + 0.002
        return True


def test_listening_is_tried_less_often_the_longer_it_was_of_no_use() -> None:
    clock = Clock()
    patience, asked = Patience(LISTEN_S, clock), []
    for _ in range(200):
        begun_s = clock.now_s
        assert not patience.listen(lambda _: True, clock.in_vain)
        asked.append(clock.now_s > begun_s)
    assert [number for number, was_asked in enumerate(asked) if was_asked] == [0, 2, 6, 14, 30, 62, 126, 191]
    while not patience.listen(lambda _: True, lambda: True):
        pass
    assert patience.listen(lambda _: True, lambda: True)
    assert not patience.listen(lambda _: False, lambda: True)


def test_listening_is_tried_again_when_it_would_have_been_of_use() -> None:
    clock = Clock()
    patience = Patience(LISTEN_S, clock)
    for _ in range(10):
        assert not patience.listen(clock.silence, lambda: True)
    patience.slept(2 * LISTEN_S)
    assert not patience.listen(lambda _: True, lambda: True)
    patience.slept(0.5 * LISTEN_S)
    assert patience.listen(lambda _: True, lambda: True)


def test_a_processor_that_others_want_is_left_to_them() -> None:
    clock = Clock()
    patience = Patience(LISTEN_S, clock)
    for num_skipped in (4, 20, 64, 64):
        assert patience.listen(clock.held_up, lambda: True), "it has come meanwhile"
        for _ in range(num_skipped):
            assert not patience.listen(clock.held_up, lambda: True)
            patience.slept(0.5 * LISTEN_S)
    assert patience.listen(lambda _: True, lambda: True)
    assert patience.listen(lambda _: True, lambda: True)


def test_nobody_listens_who_is_told_not_to() -> None:
    patience = Patience(0.0)
    assert not any(patience.listen(lambda _: True, lambda: True, 1.0) for _ in range(100))


def test_a_descriptor_is_heard_when_it_can_be_read() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert not hears(near.fileno(), LISTEN_S)
        far.send(b"something")
        assert hears(near.fileno(), LISTEN_S)
        assert hears(near.fileno(), 0)


async def test_a_loop_that_listens_hears_everybody() -> None:
    """Descriptors, timers and other threads, whether they come while it listens or while it sleeps."""

    loop = asyncio.get_running_loop()
    pairs = [socket.socketpair() for _ in range(3)]
    for pair in pairs:
        for sock in pair:
            sock.setblocking(False)

    async def echo(sock: socket.socket) -> None:
        while data := await loop.sock_recv(sock, 100):
            await loop.sock_sendall(sock, data)

    echoing = [asyncio.create_task(echo(far)) for _, far in pairs]
    for number in range(300):
        near, _ = pairs[number % len(pairs)]
        await loop.sock_sendall(near, b"%d" % number)
        assert await loop.sock_recv(near, 100) == b"%d" % number
        if number % 50 == 0:
            await asyncio.sleep(0.001)
    readable, writable = os.pipe()
    threading.Thread(target=os.write, args=(writable, b"from a thread")).start()
    assert await loop.run_in_executor(None, os.read, readable, 100) == b"from a thread"
    for descriptor in (readable, writable):
        os.close(descriptor)
    for near, _ in pairs:
        near.close()
    await asyncio.gather(*echoing)
    for _, far in pairs:
        far.close()


class Chatterbox:
    """Has always something to say."""

    may_listen = True

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno

    def listen(self, within_s: float) -> bool:
        assert 0 < within_s <= LISTEN_S
        return True


async def test_who_speaks_without_end_keeps_nobody_else_from_being_heard() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ListeningLoop)
    near, far = socket.socketpair()
    silent, _far = socket.socketpair()
    is_heard, is_due = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    def hear_other() -> None:
        order.append("other")
        loop.remove_reader(near)
        is_heard.set()

    loop.add_reader(silent, order.append, "speaker")
    loop.add_reader(near, hear_other)
    loop.listener.speaker = Chatterbox(silent.fileno())
    ticks = itertools.count(0.0, 1e-6)  # however others want the processor
    loop.listener._patience = Patience(LISTEN_S, lambda: next(ticks))
    while not order:
        await asyncio.sleep(2 * LISTEN_S)
    order.clear()
    far.send(b"hear me")
    await is_heard.wait()
    assert order == ["speaker", "other"], "in the same turn, behind what was received before"
    loop.call_later(0.001, is_due.set)
    await is_due.wait()
    loop.listener.speaker = None
    loop.remove_reader(silent)
    for sock in (near, far, silent, _far):
        sock.close()


async def test_a_loop_knows_whether_anybody_waits_for_a_turn() -> None:
    loop, (near, far) = asyncio.get_running_loop(), socket.socketpair()
    with near, far:
        assert not others_wait()
        loop.call_soon(lambda: None)
        assert others_wait()
        await asyncio.sleep(0)
        assert not others_wait()

        loop.add_reader(near, lambda: near.recv(100))
        assert not others_wait()
        far.send(b"something")
        assert others_wait()
        while others_wait():
            await asyncio.sleep(0)
        loop.remove_reader(near)

        loop.call_later(60, lambda: None).cancel()
        is_due = asyncio.Event()
        loop.call_later(0, is_due.set)
        assert others_wait()
        await is_due.wait()
        assert not others_wait()

        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(is_due.clear,))
        thread.start()
        thread.join()
        assert others_wait()


def test_on_another_loop_somebody_may_always_wait() -> None:
    async def test() -> None:
        assert others_wait()

    asyncio.run(test())
