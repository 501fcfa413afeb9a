"""Who is let in: those who know the cluster's key, and nobody else, whatever he says."""

import asyncio
import contextlib
import mmap
import os
import random
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from messenger.receiver import receiver
from messenger.receiver.receiver import UnauthenticatedPeers, refuse_connection
from messenger.sender.shm_outlet import ShmOpening
from messenger.transport.stream import Stream
from messenger.transport.transports import Transport
from messenger.wire.messages import (
    Challenge,
    FetchDone,
    Hello,
    Introduction,
    Message,
    Open,
    Refused,
    Welcome,
)
from messenger.wire.protocol import MAX_GREETING_BYTES, SPOKEN, encode_frame
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout
from mooncake.security.keys import ClusterKey
from mooncake.security.proofs import NONCE_BYTES
from tests.messenger.fabric import TINY, Fabric, fabric, until
from tests.messenger.proxy import listen
from tests.messenger.wire import Wire

NONCE = b"n" * NONCE_BYTES
HELLO = Hello(SPOKEN.newest, NONCE)
PATIENCE_S = 1.0
"""of a receiver with a stranger"""


def introduction(node: Fabric, proof: bytes) -> Introduction:
    return Introduction(proof, node.sender_identity, b"s" * 16, 0)


async def assert_turned_away(node: Fabric, wire: Wire) -> None:
    """And counted once, while others are served."""
    await wire.assert_closed()
    wire.close()
    await until(lambda: node.num_served == 0)
    assert node.received.num_unauthenticated == 1
    await node.assert_works()
    assert node.received.num_unauthenticated == 1


async def test_a_sender_with_another_key_is_a_stranger_and_knows_why(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        with pytest.raises(TransferError, match="has another cluster key"):
            await node.peers_with(ClusterKey.generate()).peer(node.address)
        await until(lambda: node.num_served == 0)
        assert node.received.num_unauthenticated == 1
        await node.assert_works()


async def test_a_sender_that_does_not_check_the_proof_gets_no_further(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.connect(node)
        await wire.say(HELLO)
        challenge = await wire.hear()
        assert isinstance(challenge, Challenge)
        proof = ClusterKey.generate().proof(b"messenger sender", challenge.nonce, NONCE)
        await wire.say(introduction(node, proof))
        await assert_turned_away(node, wire)


async def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.connect(node)
        await wire.say(Hello(99, NONCE))
        answer = await wire.hear()
        assert answer == Refused(
            f"messenger protocol version differs: ours is {SPOKEN}, theirs is 99; upgrade the receiver to a"
            " release that speaks 99 first: one version is upgraded at a time"
        )
        await wire.assert_closed()
        wire.close()
        await node.assert_works()
        assert node.received.num_unauthenticated == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"fingerprint": "other"}, "model fingerprint differs: ours is f+, theirs is other"),
        ({"layout": KVLayout(1, 1, 1, 1, "float32")}, "KV layout differs"),
    ],
)
async def test_another_model_is_refused_by_name(
    tmp_path: Path, transport: str, changed: dict[str, object], reason: str
) -> None:
    async with fabric(tmp_path, TINY, transport=transport) as node:
        with pytest.raises(TransferError, match=reason):
            await node.peers_with(node.key, **changed).peer(node.address)
        await until(lambda: node.num_served == 0)
        assert node.received.num_unauthenticated == 0
        assert not node.slots_taken
        await node.assert_works()


async def test_an_introduction_is_good_for_one_connection(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.connect(node)
        await wire.say(HELLO)
        challenge = await wire.hear()
        assert isinstance(challenge, Challenge)
        overheard = introduction(node, node.key.proof(b"messenger sender", challenge.nonce, NONCE))
        await wire.say(overheard)
        assert isinstance(await wire.hear(), Welcome)
        wire.close()
        again = await Wire.connect(node)
        await again.say(HELLO)
        assert isinstance(await again.hear(), Challenge)
        await again.say(overheard)
        await assert_turned_away(node, again)


async def test_a_proof_cannot_be_thrown_back(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire, oracle = await Wire.connect(node), await Wire.connect(node)
        await wire.say(HELLO)
        challenge = await wire.hear()
        assert isinstance(challenge, Challenge)
        await oracle.say(Hello(SPOKEN.newest, challenge.nonce))
        borrowed = await oracle.hear()
        assert isinstance(borrowed, Challenge)
        for stolen in (challenge.proof, borrowed.proof):
            node.received.num_unauthenticated = 0
            await wire.say(introduction(node, stolen))
            await wire.assert_closed()
            await until(lambda: node.received.num_unauthenticated == 1)
            wire.close()
            wire = oracle
        wire.close()
        await node.assert_works()


STRANGE_BYTES = {
    "one byte": b"\x10",
    "no header": b"\x10\0\0\0\0\0\0",
    "empty frame": bytes(8),
    "half a frame": b"\x20\0\0\0\0\0\0\0" + b"x" * 16,
    "a frame that is none": b"\x20\0\0\0\0\0\0\0" + b"\xc1" * 32,
    "HTTP": b"GET / HTTP/1.1\r\nHost: receiver\r\n\r\n",
    "too long": (MAX_GREETING_BYTES + 1).to_bytes(4, "little") + bytes(MAX_GREETING_BYTES + 5),
    "as long as may be": MAX_GREETING_BYTES.to_bytes(4, "little") + bytes(MAX_GREETING_BYTES + 4),
    "with payload": encode_frame(HELLO, 4) + b"1234",
    "short nonce": encode_frame(Hello(SPOKEN.newest, b"short")),
    "no greeting": encode_frame(Open(1, 1, "grant 1")),
    "the end first": encode_frame(FetchDone()),
    "twice hello": encode_frame(HELLO) * 2,
    "a kilobyte": random.Random(1).randbytes(1 << 10),
    "a megabyte": random.Random(2).randbytes(1 << 20),
}


@pytest.mark.parametrize("transport", [Transport.TCP, Transport.SHM])
@pytest.mark.parametrize("data", STRANGE_BYTES.values(), ids=STRANGE_BYTES.keys())
async def test_garbage_costs_a_connection(tmp_path: Path, transport: Transport, data: bytes) -> None:
    async with fabric(tmp_path, TINY, connect_timeout_s=PATIENCE_S) as node:
        wire = await Wire.connect(node, transport)
        with contextlib.suppress(ConnectionError):  # closed in the middle of it
            await wire.say_bytes(data)
        await assert_turned_away(node, wire)


@pytest.mark.parametrize("transport", [Transport.TCP, Transport.SHM])
async def test_who_leaves_in_the_middle_is_counted_once(tmp_path: Path, transport: Transport) -> None:
    async with fabric(tmp_path, TINY) as node:
        greeting = encode_frame(HELLO)
        for num_bytes in range(0, len(greeting) + 1, 5):
            wire = await Wire.connect(node, transport)
            if num_bytes:
                await wire.say_bytes(greeting[:num_bytes])
            wire.close()
            await until(lambda: node.received.num_unauthenticated)
            await until(lambda: node.num_served == 0)
            assert node.received.num_unauthenticated == 1
            node.received.num_unauthenticated = 0
        await node.assert_works()


async def test_silent_strangers_do_not_keep_others_waiting(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY, connect_timeout_s=PATIENCE_S) as node:
        wires = [await Wire.connect(node) for _ in range(20)]
        await until(lambda: node.num_served == len(wires))
        await node.assert_works()
        for wire in wires:
            await wire.assert_closed()
            wire.close()
        await until(lambda: node.received.num_unauthenticated == len(wires))


@pytest.mark.parametrize("num_descriptors", [1, 2, 5])
async def test_a_strangers_descriptors_are_closed(tmp_path: Path, num_descriptors: int) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.connect(node, Transport.SHM)
        readable, writable = os.pipe()
        os.set_blocking(readable, False)
        socket.send_fds(wire.stream._sock, [b"\0" * 8], [writable] * num_descriptors)  # type: ignore[list-item, arg-type]
        os.close(writable)
        await assert_turned_away(node, wire)
        assert os.read(readable, 1) == b""  # nobody can write to it any more
        os.close(readable)


@pytest.mark.parametrize("segment_bytes", [0, -1, 4096, 1 << 62])
@pytest.mark.parametrize("with_descriptor", [False, True])
async def test_a_segment_that_is_none_costs_a_connection(
    tmp_path: Path, segment_bytes: int, with_descriptor: bool
) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.connect(node, Transport.SHM)
        await wire.say(HELLO)
        challenge = await wire.hear()
        assert isinstance(challenge, Challenge)
        proof = node.key.proof(b"messenger sender", challenge.nonce, NONCE)
        empty = os.memfd_create("empty")
        said = Introduction(proof, node.sender_identity, b"s" * 16, 0, segment_bytes)
        await wire.say_bytes(encode_frame(said), fd=empty if with_descriptor else None)
        os.close(empty)
        await wire.assert_closed()
        wire.close()
        await node.assert_works()
        assert node.received.num_unauthenticated == 0


# -- the sender's side ------------------------------------------------------------------------------


async def meet(node: Fabric, answer: Callable[[Stream, Hello], Awaitable[None]]) -> str:
    """What a sender says of a receiver that does `answer`."""
    listener = listen(("127.0.0.1", 0))

    async def serve() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        stream = Stream(sock)
        try:
            await answer(stream, HELLO)
        finally:
            stream.close()

    serving = asyncio.create_task(serve())
    try:
        with pytest.raises(TransferError) as caught:
            await node.peers.peer(node.address_with(tcp_endpoints=(listener.getsockname(),)))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
    return str(caught.value)


def answering(*messages: Message | bytes) -> Callable[[Stream, Hello], Awaitable[None]]:
    async def answer(stream: Stream, hello: Hello) -> None:
        for message in messages:
            await stream.send([message if isinstance(message, bytes) else encode_frame(message)])
        await asyncio.Event().wait()

    return answer


async def say_nothing(stream: Stream, hello: Hello) -> None:
    await asyncio.Event().wait()


async def leave(stream: Stream, hello: Hello) -> None:
    return


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (say_nothing, r"no answer within 1 s"),
        (leave, "connection closed by the peer|reset"),
        (answering(Challenge(NONCE, NONCE)), "has another cluster key"),
        (answering(Challenge(b"", b"")), "has another cluster key"),
        (answering(Refused("no pool yet")), "refused: no pool yet"),
        (answering(HELLO), "expected Challenge or Refused, got Hello"),
        (answering(random.Random(3).randbytes(1 << 10)), "a frame announces"),
        (answering(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "a frame announces"),
        (answering(encode_frame(Challenge(NONCE, NONCE), 9) + b"123456789"), "came with a payload"),
        (answering(b"\x01"), r"no answer within 1 s"),
    ],
)
async def test_a_receiver_that_is_none_is_an_error_by_name(
    tmp_path: Path, answer: Callable[[Stream, Hello], Awaitable[None]], reason: str
) -> None:
    async with fabric(tmp_path, TINY, connect_timeout_s=PATIENCE_S) as node:
        said = await meet(node, answer)
        assert said.startswith("cannot reach messenger receiver (tcp 127.0.0.1:")
        assert re.search(reason, said)
        await node.assert_works()


async def test_who_is_turned_away_hears_why_unless_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fabric(tmp_path, TINY) as node:
        reason = "its worker has not attached"

        async def answer(stream: Stream, hello: Hello) -> None:
            await refuse_connection(
                stream, reason, node.key, node.received, UnauthenticatedPeers(), timeout_s=1.0
            )

        assert f"refused: {reason}" in await meet(node, answer)
        assert node.received.num_unauthenticated == 0
        monkeypatch.setattr(receiver, "MOST_UNKNOWN", 0)
        assert re.search("connection closed by the peer|reset", await meet(node, answer))
        assert node.received.num_unauthenticated == 1


async def test_a_probe_gets_no_seat_and_no_segment_to_write_to(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.connect(node, Transport.SHM)
        opening = ShmOpening(wire.stream, node.sender_memory.source, TINY.heads)
        welcome = await wire.introduce_probe(node, opening)
        assert welcome.slot is None
        assert node.slots_taken == set()
        fd = wire.stream.take_fd()
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)
        wire.close()


async def test_a_probe_of_unknown_identity_may_only_probe(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.connect(node)
        await wire.introduce_probe(node)
        await wire.say(Open(1, 1, "grant 1"))
        await wire.assert_closed()
        wire.close()
        await node.assert_works()
