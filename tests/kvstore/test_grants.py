"""Writes to a messenger by a peer that errs, lies or stops half-way."""

import contextlib
import os
import socket
from collections.abc import Callable

import msgspec
import pytest

from messenger.protocol import Close, Write, WriteAck, WriteEntry
from mooncake.errors import PoolFullError
from tests.kvstore.by_hand import HandMadeSender, entry_for
from tests.kvstore.nodes import (
    DEADLINE_S,
    LAYOUT,
    StartNode,
    prompt_keys,
    run,
    until,
    unused,
)

pytestmark = pytest.mark.cluster

ALL_LAYERS = range(LAYOUT.num_layers)


@pytest.mark.parametrize("ending", ["bytes", "connection"])
def test_page_of_an_unfinished_write_is_quarantined_until_it_ends(start_node: StartNode, ending: str) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        key = prompt_keys(1)
        reservation = await client.reserve(key, 0)
        grant = await client.grant(reservation.reservation_id)
        sender = HandMadeSender(grant.messenger)
        sender.open(grant)
        entry, data = entry_for(grant, key[0])
        sender.write(grant, entry, data[:100])
        page = reservation.blocks[0].page
        while client.segment.layer_view(page, 0)[:100] != data[:100]:
            await client.stats(check_integrity=True)
        await client.release(reservation.reservation_id)
        stats = await client.stats(check_integrity=True)
        assert (stats.num_quarantined, stats.integrity) == (1, None)
        with pytest.raises(PoolFullError):
            await client.reserve([], client.num_pages)
        if ending == "bytes":
            sender.sock.sendall(data[100:])
            answers = [sender.receive(), sender.receive()]
            assert all("revoked" in str(answer) or "released" in str(answer) for answer in answers)
        else:
            sender.sock.close()
        await client.wait_for_space()
        everything = await client.reserve([], client.num_pages)
        assert (
            next(b.generation for b in everything.blocks if b.page == page) == grant.pages[0].generation + 1
        )
        sender.sock.close()
        await client.close()

    run(test())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda e: WriteEntry(e.page, e.generation + 1, 0, 1, e.checksums, 0), "has generation"),
        (lambda e: WriteEntry(e.page + 1, e.generation, 0, 1, e.checksums, 0), "is no part of grant"),
        (lambda e: WriteEntry(1 << 40, e.generation, 0, 1, e.checksums, 0), "is no part of grant"),
        (lambda e: WriteEntry(e.page, e.generation, 4, 5, e.checksums, 0), "are no part of [0, 4)"),
        (lambda e: WriteEntry(e.page, e.generation, -1, 0, e.checksums, 0), "are no part of [0, 4)"),
        (lambda e: WriteEntry(e.page, e.generation, 0, 1, b"", 0), "bytes of checksums"),
    ],
)
def test_write_outside_its_grant_is_refused_before_a_byte_is_placed(
    start_node: StartNode, change: Callable[[WriteEntry], WriteEntry], complaint: str
) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        before = bytes(client.segment.buffer[client.segment.page_offset(0) :])
        key = prompt_keys(1)
        grant = await client.grant((await client.reserve(key, 0)).reservation_id)
        sender = HandMadeSender(grant.messenger)
        entry, data = entry_for(grant, key[0])
        sender.write(grant, change(entry), data)
        assert complaint in str(sender.receive())
        assert client.segment.buffer[client.segment.page_offset(0) :] == before
        # The payload was drained: the connection goes on.
        sender.write(grant, entry, data)
        assert sender.receive() == WriteAck()
        # What has arrived is not written again: its acknowledgement may only have been lost.
        sender.write(grant, entry, data)
        assert sender.receive() == WriteAck()
        sender.write(grant, msgspec.structs.replace(entry, checksums=bytes(8)), bytes(len(data)))
        assert "differ" in str(sender.receive())
        assert client.segment.layer_view(entry.page, 0) == data
        sender.sock.close()
        await client.close()

    run(test())


def test_write_after_its_grant_is_complete_changes_nothing(start_node: StartNode) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        key = prompt_keys(1)
        reservation = await client.reserve(key, 0)
        grant = await client.grant(reservation.reservation_id)
        sender = HandMadeSender(grant.messenger)
        for layer in ALL_LAYERS:
            sender.write(grant, *entry_for(grant, key[0], layer=layer))
            sender.receive()
        await client.wait_arrived(reservation.reservation_id)
        client.segment.layer_view(reservation.blocks[0].page, 0)[:] = other = bytes(LAYOUT.layer_bytes)
        sender.write(grant, *entry_for(grant, key[0]))
        assert sender.receive() == WriteAck()
        assert client.segment.layer_view(reservation.blocks[0].page, 0) == other
        sender.send(Close(1, None))
        sender.sock.close()
        await client.close()

    run(test())


def test_peer_that_speaks_another_protocol_is_dropped(start_node: StartNode) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        with socket.create_connection(client.address.tcp_endpoints[0], DEADLINE_S) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):  # it may not have read all of ours
                assert sock.recv(1) == b""
        await client.stats(check_integrity=True)
        await client.close()

    run(test())


@pytest.mark.parametrize(
    "lie",
    [
        "segment without descriptor",
        "negative segment",
        "segment beyond its descriptor",
        "payload over shared memory",
        "source outside the segment",
        "negative source",
        "payload shorter than its pages",
        "no entries",
    ],
)
def test_lying_peer_loses_its_connection_and_does_no_harm(start_node: StartNode, lie: str) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        key = prompt_keys(1)
        reservation = await client.reserve(key, 0)
        grant = await client.grant(reservation.reservation_id)
        fd = os.memfd_create("hand-made")
        os.truncate(fd, 8192)
        entry, data = entry_for(grant, key[0])
        match lie:
            case "segment without descriptor":
                sender = HandMadeSender(grant.messenger, None, 8192)
            case "negative segment":
                sender = HandMadeSender(grant.messenger, fd, -1)
            case "segment beyond its descriptor":
                sender = HandMadeSender(grant.messenger, fd, 8193)
            case "payload over shared memory":
                sender = HandMadeSender(grant.messenger, fd, 8192)
                sender.write(grant, entry, data)
            case "source outside the segment" | "negative source":
                sender = HandMadeSender(grant.messenger, fd, 8192)
                entry = msgspec.structs.replace(entry, source_offset=-1 if lie == "negative source" else 8000)
                sender.send(Write(1, grant.grant_id, [entry]))
            case "payload shorter than its pages":
                sender = HandMadeSender(grant.messenger)
                sender.send(Write(1, grant.grant_id, [entry]), payload_bytes=len(data) - 1)
            case _:
                sender = HandMadeSender(grant.messenger)
                sender.send(Write(1, grant.grant_id, []))
        assert sender.is_dropped()
        sender.sock.close()
        os.close(fd)
        await client.release(reservation.reservation_id)
        assert (await until(client, unused)).num_sealed == 0
        await client.close()

    run(test())


def test_write_over_shared_memory_that_comes_again_is_acknowledged_and_not_placed(
    start_node: StartNode,
) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        key = prompt_keys(1)
        grant = await client.grant((await client.reserve(key, 0)).reservation_id)
        entry, data = entry_for(grant, key[0])
        fd = os.memfd_create("hand-made")
        os.truncate(fd, 8192)
        os.pwrite(fd, data, 0)
        sender = HandMadeSender(grant.messenger, fd, 8192)
        sender.send(Write(1, grant.grant_id, [entry]))
        assert sender.receive() == WriteAck()
        os.pwrite(fd, bytes(len(data)), 0)
        sender.send(Write(1, grant.grant_id, [entry]))
        assert sender.receive() == WriteAck()
        assert client.segment.layer_view(entry.page, 0) == data
        sender.sock.close()
        os.close(fd)
        await client.close()

    run(test())
