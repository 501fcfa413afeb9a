"""Requests that are sent and answered within one call, and what becomes of those that are not."""

import asyncio
import contextlib
import gc
import socket
import tempfile
from collections.abc import AsyncIterator

import pytest

from messenger.sender.lane import Lane
from messenger.sender.peer import Peer
from messenger.sender.requests import FetchRequest, Outcome, WriteRequest
from messenger.sender.transfer import Transfer
from messenger.transport.frames import Frames
from messenger.transport.stream import Stream
from messenger.transport.transports import Path, TcpInlet, Traffic, Transport
from messenger.wire.messages import (
    Ended,
    Fetch,
    FetchDone,
    Found,
    FoundBlock,
    Message,
    RefusalKind,
    WriteAck,
    WriteEntry,
)
from messenger.wire.protocol import Phase, Side, encode_frame
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout
from tests.messenger.fabric import key, until
from tests.messenger.pages import Memory
from tests.messenger.proxy import listen

LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=64, block_size=64, dtype="bfloat16")
NUM_BYTES = LAYOUT.block_bytes
ACK = encode_frame(WriteAck())


class Asker:
    """A session of one lane, whose other end is a socket of the test: what is said there in advance is heard
    within the call."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        assert NUM_BYTES == 64 << 10
        self.near, self.far = near, far
        self.memory = Memory(LAYOUT, 4)
        self.memory.fill(1)
        self.traffic = Traffic()
        self.peer = Peer("receiver", self.traffic)
        stream = Stream(near)
        frames = Frames(stream, Side.SENDER)
        frames._reader._enter(Phase.OPEN)
        path = Path(Transport.TCP, near.getpeername())
        self.lane = Lane(0, path, frames, TcpInlet(stream), self.memory.source, LAYOUT, self.peer, 5.0)
        self.lane._lingering.patience._now_s = lambda: 0.0  # whoever else has the processor meanwhile
        self.outcomes: list[Outcome] = []

    def transfer(self, grant_id: int = 1) -> Transfer:
        return self.peer.transfer(grant_id, "a test", lambda: None)

    def entry(self, page: int) -> WriteEntry:
        layers = range(LAYOUT.num_layers)
        return WriteEntry(page, 1, 0, 4, self.memory.checksums(page, layers), self.memory.offset(page, 0))

    async def write(self, transfer: Transfer, page: int = 0) -> None:
        await transfer.write([self.entry(page)], NUM_BYTES, self.outcomes.append)

    async def fetch(self, page: int) -> dict[int, bytes]:
        return await self.peer.fetch([key(page)], [self.memory.page(page)], range(LAYOUT.num_layers))

    def found(self, page: int) -> bytes:
        """The answer to a fetch: what is in the page."""
        block = FoundBlock(0, self.memory.checksums(page, range(LAYOUT.num_layers)), 5)
        return encode_frame(Found([block]), NUM_BYTES) + bytes(self.memory.page(page))

    async def heard(self, num_bytes: int) -> bytes:
        """At the other end."""
        data = b""
        while len(data) < num_bytes:
            data += await asyncio.get_running_loop().sock_recv(self.far, num_bytes - len(data))
        return data

    async def heard_write(self, page: int) -> None:
        """The next frame that has a payload: the bytes of `page`."""
        payload_bytes = 0
        while not payload_bytes:
            head = await self.heard(8)
            await self.heard(int.from_bytes(head[:4], "little"))
            payload_bytes = int.from_bytes(head[4:], "little")
        assert payload_bytes == NUM_BYTES
        assert await self.heard(NUM_BYTES) == self.memory.page(page)


@contextlib.asynccontextmanager
async def asked() -> AsyncIterator[Asker]:
    listener, near = listen(("127.0.0.1", 0)), socket.socket()
    near.connect(listener.getsockname())
    far, _ = await asyncio.get_running_loop().sock_accept(listener)
    listener.close()
    far.setblocking(False)
    asker = Asker(near, far)
    running = asyncio.create_task(asker.peer.run_lane(asker.lane))
    await until(lambda: asker.lane._stream.may_listen)
    try:
        yield asker
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        far.close()
        asker.memory.close()


async def test_a_write_that_is_answered_at_once_is_done_without_a_turn_of_the_loop() -> None:
    async with asked() as asker:
        with asker.transfer() as transfer:
            for page in range(3):
                asker.far.send(ACK)
                await asker.write(transfer, page)
                assert asker.outcomes == [Outcome.PLACED] * (page + 1)
                assert not asker.lane.num_outstanding
                assert not asker.peer.flow.in_flight_bytes
                await asker.heard_write(page)
        assert asker.traffic.sent_bytes[Transport.TCP] == 3 * NUM_BYTES
        assert asker.traffic.by_peer["receiver"].busy_s[Transport.TCP] > 0
        assert asker.lane.has_answered


async def test_what_a_call_needed_is_freed_without_a_search_for_garbage() -> None:
    async with asked() as asker:
        gc.collect()
        gc.disable()
        try:
            with asker.transfer() as transfer:
                asker.far.send(ACK)
                await asker.write(transfer)
            asker.far.send(asker.found(1))
            assert set(await asker.fetch(1)) == {0}
            assert asker.outcomes == [Outcome.PLACED]
            assert not [kept for kept in gc.get_objects() if type(kept) in (WriteRequest, FetchRequest)]
        finally:
            gc.enable()


async def test_an_answer_that_does_not_come_in_time_is_taken_when_it_does() -> None:
    async with asked() as asker:
        with asker.transfer() as transfer:
            await asker.write(transfer)
            assert not asker.outcomes
            assert asker.lane.num_outstanding == 1
            assert asker.peer.flow.in_flight_bytes == NUM_BYTES
            asker.far.send(ACK)
            await until(lambda: asker.outcomes == [Outcome.PLACED])
            await asker.heard_write(0)
            assert not asker.peer.flow.in_flight_bytes
            asker.far.send(ACK)
            await asker.write(transfer)
            await until(lambda: len(asker.outcomes) == 2)


async def write_two(asker: Asker, num_asked: range, others_bytes: int = 0) -> None:
    """Of the first of which so many bytes leave at once, behind `others_bytes` for somebody else."""
    assert asker.lane.exchange is not None
    with asker.transfer() as transfer, asker.transfer(2) as other:
        both = asyncio.gather(asker.write(transfer, 1), asker.write(other, 2))
        await asyncio.sleep(0)
        assert asker.lane.exchange._direct.num_asked in num_asked
        await asker.heard(others_bytes)
        await asker.heard_write(1)
        await asker.heard_write(2)
        assert not asker.outcomes
        asker.far.send(ACK + ACK)
        await both
        await until(lambda: asker.outcomes == [Outcome.PLACED] * 2)


async def test_what_the_kernel_does_not_take_at_once_follows() -> None:
    async with asked() as asker:
        asker.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        others_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                others_bytes += asker.near.send(bytes(1 << 20))
        await write_two(asker, range(NUM_BYTES), others_bytes)


async def test_what_the_segments_file_does_not_give_follows() -> None:
    async with asked() as asker:
        assert asker.lane.exchange is not None
        with tempfile.TemporaryFile() as half:
            half.write(asker.memory.view[: asker.memory.offset(1, 2)])
            half.flush()
            asker.lane.exchange._direct._placement.segment_fd = half.fileno()
            await write_two(asker, range(NUM_BYTES // 2, NUM_BYTES))


@pytest.mark.parametrize("before", [Ended(99, "another transfer")])
@pytest.mark.parametrize("num_bytes", [1, 8, len(ACK)])
async def test_other_news_and_half_an_answer_are_read_as_ever(before: Message, num_bytes: int) -> None:
    async with asked() as asker:
        with asker.transfer() as transfer:
            asker.far.send(encode_frame(before) + ACK[:num_bytes])
            await asker.write(transfer)
            asker.far.send(ACK[num_bytes:])
            await until(lambda: asker.outcomes == [Outcome.PLACED])


async def test_a_write_that_is_refused_fails_its_transfer() -> None:
    async with asked() as asker:
        with asker.transfer() as transfer:
            asker.far.send(encode_frame(WriteAck(RefusalKind.STALE, "too late")))
            with pytest.raises(TransferError, match="receiver refused a write: too late"):
                await asker.write(transfer)
            assert asker.outcomes == [Outcome.FAILED]
            assert not asker.peer.flow.in_flight_bytes
            with pytest.raises(TransferError):  # and nothing more is sent
                await asker.write(transfer)
            assert not asker.lane.num_outstanding


async def test_a_lost_connection_fails_what_was_sent_over_it() -> None:
    async with asked() as asker:
        with asker.transfer() as transfer:
            asker.far.close()
            with contextlib.suppress(TransferError):
                await asker.write(transfer)
            await until(lambda: asker.outcomes == [Outcome.FAILED])
        assert asker.peer.closed_reason is not None
        assert not asker.peer.flow.in_flight_bytes


@pytest.mark.parametrize("num_there", [None, 0, 1, 20, 80, 81, 17_000, NUM_BYTES])
async def test_a_block_is_there_with_the_call_or_when_the_rest_of_it_has_come(num_there: int | None) -> None:
    """`num_there`: bytes of the answer that come within the call."""
    async with asked() as asker:
        data, checksums = asker.found(1), asker.memory.checksums(1, range(LAYOUT.num_layers))
        block = data[-NUM_BYTES:]
        asker.memory.page(1)[:] = bytes(NUM_BYTES)
        fetching = asyncio.create_task(asker.fetch(1))
        asker.far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * NUM_BYTES)
        assert asker.far.send(data[:num_there]) == len(data[:num_there])
        await asyncio.sleep(0)
        assert fetching.done() == (num_there is None)
        asker.far.send(data[len(data[:num_there]) :])
        assert await fetching == {0: checksums}
        assert asker.memory.page(1) == block
        fetch = encode_frame(Fetch([key(1)], 0, 4))
        done = encode_frame(FetchDone())
        assert await asker.heard(len(fetch + done)) == fetch + done  # in time
        assert asker.traffic.received_bytes[Transport.TCP] == NUM_BYTES


async def test_a_damaged_block_is_none() -> None:
    async with asked() as asker:
        data = bytearray(asker.found(1))
        data[-1] ^= 1
        asker.far.send(data)
        assert await asker.fetch(1) == {}
        assert asker.traffic.num_checksum_failures == 1
        asker.far.send(asker.found(2))
        assert set(await asker.fetch(2)) == {0}


@pytest.mark.parametrize(("num_bytes", "num_layers"), [(240, 1), (257 * 241, 257), (LAYOUT.layer_bytes, 1)])
async def test_an_acknowledgement_is_no_block(num_bytes: int, num_layers: int) -> None:
    async with asked() as asker:
        view = asker.memory.page(1)[:num_bytes]
        asker.far.send(ACK)
        with pytest.raises(TransferError, match="an acknowledgement came for no write"):
            await asker.peer.fetch([key(1)], [view], range(num_layers))


async def test_what_was_cancelled_after_it_was_sent_still_takes_its_answer() -> None:
    async with asked() as asker:
        fetching = asyncio.create_task(asker.fetch(1))
        await until(lambda: asker.lane.num_outstanding)
        fetching.cancel()
        await asyncio.sleep(0)
        assert not fetching.done()
        asker.far.send(asker.found(1))
        with pytest.raises(asyncio.CancelledError):
            await fetching
        asker.far.send(asker.found(2))
        assert set(await asker.fetch(2)) == {0}
