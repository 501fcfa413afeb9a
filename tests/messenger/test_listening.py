"""Listening before falling asleep: when it is tried, and that nobody is missed meanwhile."""

import asyncio
import os
import socket
import threading

from messenger.listening import Patience, listening_loop


def test_listening_is_tried_less_often_the_longer_it_was_of_no_use() -> None:
    patience, num_asked = Patience(), 0
    near, far = socket.socketpair()
    far.send(b"something else")

    def silence() -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    asked = []
    for _ in range(200):
        before = num_asked
        assert not patience.listen(near.fileno(), silence)
        asked.append(num_asked > before)
    assert [number for number, was_asked in enumerate(asked) if was_asked] == [0, 2, 6, 14, 30, 62, 126, 191]
    while not patience.listen(near.fileno(), lambda: True):
        pass
    assert patience.listen(near.fileno(), lambda: True)
    near.recv(100)
    assert not patience.listen(near.fileno(), lambda: True)
    near.close()
    far.close()


def test_a_loop_that_listens_hears_everybody() -> None:
    """Descriptors, timers and other threads, whether they come while it listens or while it sleeps."""

    async def test() -> None:
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

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await test()

    with asyncio.Runner(loop_factory=listening_loop) as runner:
        runner.run(bounded())
