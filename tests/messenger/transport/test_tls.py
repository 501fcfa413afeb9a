"""Connections over TLS that break."""

import asyncio
import contextlib
import shutil
import socket
from pathlib import Path

import pytest

from messenger.transport.stream import Stream
from messenger.transport.tls import Tls
from mooncake.errors import TransferError
from tests.deadline import DEADLINE_S
from tests.kvstore.test_tls import Authority
from tests.messenger.fabric import LARGE, SMALL, fabric, until
from tests.messenger.proxy import Plan
from tests.messenger.wire import Wire

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

MIB = 1 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    tls = Tls.of(Authority(tmp_path_factory.mktemp("authority"), "ours").certify("node"))
    assert tls is not None
    return tls


def tls_pair(tls: Tls) -> tuple[Stream, Stream]:
    near, far = socket.socketpair()
    return Stream(tls.connect(near)), Stream(tls.accept(far))


async def test_writes_and_fetches_arrive_whole(tmp_path: Path, tls: Tls) -> None:
    async with fabric(tmp_path, LARGE, 12, tls=tls, streams=2) as node:
        await node.peer(2)
        node.pages.grant(1, range(8))
        node.publish([9, 10])
        await asyncio.gather(node.write(1, range(8)), node.fetch([9]), node.fetch([10]))
        node.assert_written(range(8))
        for page in (9, 10):
            assert node.sender_memory.page(page) == node.receiver_memory.page(page)


async def test_what_is_read_after_the_end_is_no_ciphertext(tls: Tls) -> None:
    streams = tls_pair(tls)
    await asyncio.gather(*(stream.shake_hands() for stream in streams))
    data = bytes(MIB)
    sending = asyncio.create_task(streams[0].send([data]))
    first = memoryview(bytearray(20_000))
    await streams[1].receive_into([first])
    streams[1].shut_down()
    received = bytearray()
    piece = bytearray(5000)
    with contextlib.suppress(OSError):
        while True:
            received += piece[: await streams[1].receive_some([memoryview(piece)])]
    assert received == bytes(len(received))
    for stream in streams:
        stream.close()
    await asyncio.gather(sending, return_exceptions=True)


async def test_others_have_their_turn_while_small_records_come_fast(tls: Tls) -> None:
    near, far = tls_pair(tls)
    await asyncio.gather(near.shake_hands(), far.shake_hands())
    num_taken = 0

    def take() -> bool:
        nonlocal num_taken
        num_taken += far.num_ahead
        assert num_taken < 10_000
        far.take(far.num_ahead)
        near.send_now([memoryview(b"and another")])  # before the one at the other end is through
        return False

    await near.send([b"one"])
    await asyncio.wait_for(far.more(take), DEADLINE_S)
    near.close()
    far.close()


async def test_a_path_that_dies_is_replaced_by_the_other(tmp_path: Path, tls: Tls) -> None:
    async with fabric(tmp_path, LARGE, 12, tls=tls, ack_timeout_s=0.4) as node:
        proxies = [node.proxy(), node.proxy()]
        await node.peer(2)
        grant = node.pages.grant(1, range(10))
        write = asyncio.create_task(node.write(1, range(10)))
        await until(lambda: grant.arrived)
        proxies[0].black_hole()
        await write
        node.assert_written(range(10))
        assert node.received.num_checksum_failures == 0


@pytest.mark.parametrize("reset_at", [0, 1, 100, 1000, 3000, 5000, 9000])
async def test_one_of_two_connections_is_reset(tmp_path: Path, tls: Tls, reset_at: int) -> None:
    async with fabric(tmp_path, SMALL, tls=tls) as node:
        node.proxy().plans.append(Plan(reset_up_at=reset_at))
        node.proxy()
        peer = await node.peer()
        await until(lambda: len(peer.lanes) == 2 or not node.proxies[0].links[0].is_open)
        node.pages.grant(1, range(6))
        await node.write(1, range(6), peer=peer)
        node.assert_written(range(6))


async def test_a_byte_damaged_on_its_way_costs_the_connection(tmp_path: Path, tls: Tls) -> None:
    async with fabric(tmp_path, LARGE, 6, tls=tls) as node:
        node.proxy().plans.append(Plan(flip_up_at=LARGE.block_bytes // 2))
        node.pages.grant(1, [0, 1])
        with pytest.raises(TransferError, match="was lost"):
            await node.write(1, [0, 1])
        assert node.received.num_checksum_failures == 0  # it never came so far
        await node.assert_works()


async def test_who_speaks_no_tls_is_a_stranger(tmp_path: Path, tls: Tls) -> None:
    async with fabric(tmp_path, SMALL, tls=tls, connect_timeout_s=1.0) as node:
        for data in (b"", b"x", b"GET / HTTP/1.1\r\n\r\n", bytes(1000)):
            wire = await Wire.connect(node)
            await until(lambda: node.num_served == 1)
            if data:
                await wire.say_bytes(data)
            await wire.assert_closed()
            wire.close()
            await until(lambda: node.num_served == 0)
        assert node.received.num_unauthenticated == 4
        await node.assert_works()


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_tls_at_one_side_only_is_an_error_that_says_so(tmp_path: Path, tls: Tls, side: str) -> None:
    async with fabric(tmp_path, SMALL, tls=tls if side == "sender" else None) as node:
        node.tls = None if side == "sender" else tls  # the receiver's, from now on
        with pytest.raises(TransferError, match=r"give security\.tls_cert, tls_key and tls_ca"):
            await node.peers.peer(node.address)
        await until(lambda: node.num_served == 0)
        assert node.received.num_unauthenticated == 1


async def test_a_certificate_of_another_authority_is_an_error_that_says_so(tmp_path: Path, tls: Tls) -> None:
    theirs = Tls.of(Authority(tmp_path, "theirs").certify("node"))
    async with fabric(tmp_path, SMALL, tls=tls) as node:
        node.tls = theirs
        with pytest.raises(TransferError, match=r"certificate verify failed.* signed by one authority"):
            await node.peers.peer(node.address)
        await until(lambda: node.num_served == 0)
        assert node.received.num_unauthenticated == 1
