"""Which frames are ready, and when."""

import asyncio
import socket

import pytest

from messenger.transport.frames import Frames
from messenger.transport.stream import AHEAD_BYTES, Stream
from messenger.wire.messages import Hello, Introduction, Probe
from messenger.wire.protocol import Side, encode_frame

GREETINGS = encode_frame(Hello(1, b"")) + encode_frame(Introduction(b"", None, b"", 0))


def frames_of(near: socket.socket) -> Frames:
    """A receiver's, on a connection that has been opened."""
    return Frames(Stream(near), Side.RECEIVER)


@pytest.mark.parametrize("payload_bytes", [1, 100, AHEAD_BYTES])
async def test_a_frame_is_ready_before_its_payload(payload_bytes: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        frames = frames_of(near)
        far.sendall(GREETINGS + encode_frame(Probe(), payload_bytes))
        for _ in range(2):
            await frames.next()
        assert (await frames.next()).payload_bytes == payload_bytes
        assert frames.stream.num_ahead == 0


async def test_frames_are_dispatched_until_one_takes_a_while() -> None:
    near, far = socket.socketpair()
    with near, far:
        frames = frames_of(near)
        handled: list[str] = []

        def handle() -> bool:
            while (frame := frames.ready()) is not None:
                handled.append(type(frame.message).__name__)
                if handled[-1] == "Probe":
                    return True
            return False

        dispatching = asyncio.create_task(frames.dispatch(handle))
        for byte in GREETINGS + encode_frame(Probe()):
            assert not dispatching.done()
            far.sendall(bytes([byte]))
            for _ in range(3):
                await asyncio.sleep(0)
        await dispatching
        assert handled == ["Hello", "Introduction", "Probe"]
