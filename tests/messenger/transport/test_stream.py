"""Bytes through a pair of sockets, in all splits, and what happens when a socket ends."""

import asyncio
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from messenger.transport.outbox import Outbox
from messenger.transport.stream import TURN_BYTES, Stream
from mooncake.errors import TransferError
from tests.messenger.fabric import until
from tests.messenger.proxy import listen

MIB = 1 << 20


@asynccontextmanager
async def pair(family: int = socket.AF_UNIX) -> AsyncIterator[tuple[Stream, Stream]]:
    if family == socket.AF_UNIX:
        near, far = socket.socketpair()
    else:
        listener, near = listen(("127.0.0.1", 0)), socket.socket()
        near.connect(listener.getsockname())
        far, _ = await asyncio.get_running_loop().sock_accept(listener)
        listener.close()
    streams = Stream(near), Stream(far)
    try:
        yield streams
    finally:
        for stream in streams:
            stream.close()


both_families = pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])


@both_families
async def test_everything_arrives_in_order_however_it_is_split(family: int) -> None:
    draw = random.Random(1)
    async with pair(family) as (near, far):
        data = draw.randbytes(3 * MIB)
        sizes = [0, 1, 2, 8, 100, 4095, 4096, 4097, 16 << 10, 100_000]

        async def send() -> None:
            rest = memoryview(data)
            while rest:
                buffers = []
                for _ in range(draw.randint(1, 5)):
                    size = draw.choice(sizes)
                    buffers.append(rest[:size])
                    rest = rest[size:]
                await near.send(buffers)

        sending = asyncio.create_task(send())
        received = bytearray()
        while len(received) < len(data):
            room = [bytearray(draw.choice(sizes[1:])) for _ in range(draw.randint(1, 3))]
            num_bytes = await far.receive_some([memoryview(buffer) for buffer in room])
            received += b"".join(room)[:num_bytes]
        await sending
        assert bytes(received) == data


async def test_more_buffers_than_the_kernel_takes_at_once() -> None:
    async with pair() as (near, far):
        data = random.Random(2).randbytes(3 * 3000)
        view, into = memoryview(data), bytearray(len(data))
        sending = asyncio.create_task(near.send([view[at : at + 3] for at in range(0, len(data), 3)]))
        await far.receive_into([memoryview(into)[at : at + 3] for at in range(0, len(data), 3)])
        await sending
        assert bytes(into) == data


async def test_between_processes_of_one_host_nothing_is_paced() -> None:
    async with pair(socket.AF_INET) as streams:
        for stream in streams:
            name = stream._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)  # type: ignore[union-attr]
            assert name.rstrip(b"\0") == b"reno"


@both_families
async def test_large_buffers_are_filled_behind_small_ones(family: int) -> None:
    async with pair(family) as (near, far):
        data = random.Random(3).randbytes(MIB + 8)
        sending = asyncio.create_task(near.send([data]))
        header, body = bytearray(8), bytearray(MIB)
        await far.receive_into([memoryview(header)])
        await far.receive_into([memoryview(body)])
        await sending
        assert bytes(header + body) == data


async def test_a_peer_that_closes_ends_the_waiting() -> None:
    async with pair() as (near, far):
        receiving = asyncio.create_task(far.receive_into([memoryview(bytearray(10))]))
        await near.send([b"123"])
        near.close()
        with pytest.raises(ConnectionResetError, match="closed by the peer"):
            await receiving


async def test_closing_ends_whoever_waits_here() -> None:
    async with pair() as (near, _):
        receiving = asyncio.create_task(near.receive_some([memoryview(bytearray(10))]))
        sending = asyncio.create_task(near.send([bytes(8 * MIB)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        near.close()
        for waiting in (receiving, sending):
            with pytest.raises(ConnectionError):
                await waiting
        with pytest.raises(OSError, match=r"closed|descriptor"):
            await near.receive_some([memoryview(bytearray(10))])
        with pytest.raises(OSError, match=r"closed|descriptor"):
            await near.send([b"1"])


async def test_shutting_down_ends_both_directions_and_may_be_repeated() -> None:
    async with pair() as (near, _):
        receiving = asyncio.create_task(near.receive_some([memoryview(bytearray(10))]))
        sending = asyncio.create_task(near.send([bytes(8 * MIB)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for _ in range(2):
            near.shut_down()
        for waiting in (receiving, sending):
            with pytest.raises(ConnectionError):
                await waiting


async def test_a_reset_is_an_error_on_both_directions() -> None:
    async with pair(socket.AF_INET) as (near, far):
        receiving = asyncio.create_task(near.receive_some([memoryview(bytearray(10))]))
        await asyncio.sleep(0)
        far._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        with pytest.raises(ConnectionError):
            await receiving
        with pytest.raises(ConnectionError):
            await near.send([bytes(MIB)])


async def test_a_cancelled_receiver_leaves_the_socket_usable_to_close() -> None:
    async with pair() as (near, far):
        receiving = asyncio.create_task(far.receive_some([memoryview(bytearray(10))]))
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await near.send([b"for nobody"])  # wakes it, and nobody waits
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_descriptor_travels_beside_its_bytes() -> None:
    async with pair() as (near, far):
        readable, writable = os.pipe()
        await near.send([b"hello"], fd=writable)
        os.close(writable)
        into = bytearray(5)
        await far.receive_into([memoryview(into)])
        fd = far.take_fd()
        assert fd is not None
        assert far.take_fd() is None
        os.write(fd, b"it is the pipe")
        os.close(fd)
        assert os.read(readable, 100) == b"it is the pipe"
        os.close(readable)


async def test_descriptors_that_nobody_takes_are_closed() -> None:
    async with pair() as (near, far):
        readable, writable = os.pipe()
        for _ in range(3):
            await near.send([b"x"], fd=writable)
            await far.receive_into([memoryview(bytearray(1))])
        os.close(writable)
        far.close()
        assert os.read(readable, 1) == b""
        os.close(readable)


async def test_an_outbox_keeps_the_order_and_never_waits() -> None:
    async with pair() as (near, far):
        emptied: list[bool] = []
        outbox = Outbox(near, lambda: emptied.append(True))
        messages = [bytes([number % 251]) * (1 + 1000 * number) for number in range(100)]
        for message in messages:
            outbox.post(message[:1], message[1:])
        assert len(outbox) > 0
        assert not emptied
        for message in messages:
            into = bytearray(len(message))
            await far.receive_into([memoryview(into)])
            assert into == message
        await until(lambda: emptied)
        assert len(outbox) == 0
        outbox.post(b"at once")
        assert len(outbox) == 0
        await outbox.close()


async def test_an_outbox_that_is_closed_sends_no_more() -> None:
    async with pair() as (near, far):
        outbox = Outbox(near)
        outbox.post(bytes(8 * MIB))
        outbox.post(b"more")
        await outbox.close()
        near.close()
        with pytest.raises(ConnectionError):
            await far.receive_into([memoryview(bytearray(8 * MIB + 4))])


async def test_an_outbox_whose_peer_has_gone_shuts_its_stream_down() -> None:
    async with pair() as (near, far):
        outbox = Outbox(near)
        receiving = asyncio.create_task(near.receive_some([memoryview(bytearray(1))]))
        outbox.post(bytes(8 * MIB))
        await asyncio.sleep(0)
        far.close()
        with pytest.raises(ConnectionError):
            await receiving
        await outbox.close()
        with pytest.raises(OSError, match=r"pipe|reset"):
            Outbox(near).post(b"too late")


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Counter[str]]:
    """Count how often others have their turn within."""
    turns = Counter[str]()

    async def count() -> None:
        while True:
            turns["others"] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        yield turns
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


async def test_others_have_their_turn_while_bytes_come_fast() -> None:
    async with pair() as (near, far), counted_turns() as turns:
        into = memoryview(bytearray(16 * MIB))
        sending = asyncio.create_task(near.send([bytes(16 * MIB)]))
        await far.receive_into([into])
        await sending
    assert turns.total() >= 16


async def test_a_turn_is_given_when_it_is_time() -> None:
    async with pair() as (near, _):
        order = list[str]()
        asyncio.get_running_loop().call_soon(order.append, "other")
        await near.take_turns()
        assert order == [], "it is not time"
        near.moved(TURN_BYTES)
        await near.take_turns()
        assert order == ["other"]
        assert not near.is_turn_over


async def test_what_is_ahead_is_taken_in_pieces_and_the_rest_follows() -> None:
    async with pair() as (near, far):
        data = random.Random(4).randbytes(MIB)
        sending = asyncio.create_task(near.send([data]))
        await far.more(lambda: True)
        assert far.ahead == data[: far.num_ahead]
        far.take(3)
        into = memoryview(bytearray(len(data) - 3))
        await far.receive_into([into[:5], into[5:]])
        await sending
        assert into == data[3:]


async def test_there_is_room_for_as_much_as_is_wanted() -> None:
    async with pair() as (near, far):
        data = random.Random(5).randbytes(300_000)
        sending = asyncio.create_task(near.send([data]))
        await far.more(lambda: True)
        far.take(1)
        far.wanted_bytes = len(data) - 1
        await far.more(lambda: far.num_ahead == len(data) - 1)
        await sending
        assert far.ahead == data[1:]
        far.take(far.num_ahead)
        await near.send([b"more"])
        await far.more(lambda: far.num_ahead == 4)
        assert far.ahead == b"more"


async def test_what_comes_is_offered_until_it_is_enough() -> None:
    async with pair() as (near, far):
        taken = b""

        def take() -> bool:
            nonlocal taken
            taken += bytes(far.ahead)
            far.take(far.num_ahead)
            return taken.endswith(b".")

        waiting = asyncio.create_task(far.more(take))
        for piece in (b"1", b"2", b"3."):
            await near.send([piece])
            while taken[-1:] != piece[-1:]:
                assert not waiting.done()
                await asyncio.sleep(0)
        await waiting
        assert taken == b"123."


async def test_an_error_of_who_takes_ends_the_waiting() -> None:
    async with pair() as (near, far):

        def take() -> bool:
            raise TransferError("not like this")

        waiting = asyncio.create_task(far.more(take))
        await asyncio.sleep(0)
        await near.send([b"1"])
        with pytest.raises(TransferError, match="not like this"):
            await waiting


async def test_sending_counts_as_a_turn() -> None:
    async with pair() as (near, far), counted_turns() as turns:
        into = memoryview(bytearray(100_000))
        for _ in range(100):
            rest = near.send_now([memoryview(bytes(100_000))])
            await near.take_turns()
            await near.send(rest)
            await far.receive_into([into])
    assert turns.total() >= 100 * 100_000 // MIB
