"""Writes to a messenger by a peer that errs, lies or stops half-way."""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from messenger.receiver.receiver import MOST_UNKNOWN
from messenger.wire.messages import (
    Abandon,
    Close,
    RefusalKind,
    TransferEnded,
    Welcome,
    Write,
    WriteAck,
    WriteEntry,
)
from mooncake.errors import PoolFullError, TransferError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Grant
from tests.kvstore.by_hand import IDENTITY, HandMadeSender, entry_for, part_for
from tests.kvstore.nodes import (
    DEADLINE_S,
    LAYOUT,
    StartNode,
    prompt_keys,
    until,
    unused,
)

pytestmark = pytest.mark.cluster

ALL_LAYERS = range(LAYOUT.num_layers)
MEMORY_BYTES = 8192


class Granted(NamedTuple):
    """A worker, and a reservation of one block that it has granted."""

    client: WorkerClient
    key: list[BlockKey]
    reservation: Reservation
    grant: Grant


@pytest_asyncio.fixture
async def granted(start_node: StartNode) -> AsyncIterator[Granted]:
    client, key = await start_node("decode").connect(), prompt_keys(1)
    reservation = await client.reserve(key, 0)
    yield Granted(client, key, reservation, await client.grant(reservation.reservation_id))
    await client.close()


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of a sender's memory, of MEMORY_BYTES."""
    fd = os.memfd_create("hand-made")
    os.truncate(fd, MEMORY_BYTES)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("ending", ["bytes", "connection"])
async def test_page_of_an_unfinished_write_is_quarantined_until_it_ends(
    granted: Granted, ending: str
) -> None:
    client, key, reservation, grant = granted
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
    with pytest.raises(PoolFullError) as full:
        await client.reserve([], client.num_pages)
    if ending == "bytes":
        sender.sock.sendall(data[100:])
        answers = [sender.receive(), sender.receive()]
        assert all("revoked" in str(answer) or "released" in str(answer) for answer in answers)
    else:
        sender.sock.close()
    await client.wait_for_space(full.value)
    everything = await client.reserve([], client.num_pages)
    assert next(b.generation for b in everything.blocks if b.page == page) == grant.pages[0].generation + 1
    sender.sock.close()


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
async def test_write_outside_its_grant_is_refused_before_a_byte_is_placed(
    granted: Granted, change: Callable[[WriteEntry], WriteEntry], complaint: str
) -> None:
    client, key, _, grant = granted
    before = bytes(client.segment.buffer[client.segment.page_offset(0) :])
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


async def test_write_after_its_grant_is_complete_changes_nothing(granted: Granted) -> None:
    client, key, reservation, grant = granted
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


async def test_block_that_lies_where_another_belongs_is_dropped_when_that_one_comes(
    start_node: StartNode,
) -> None:
    """As after a bit of the page's number was flipped on its way: each matches its own checksums."""
    client = await start_node("decode").connect()
    keys = prompt_keys(2)
    reservation = await client.reserve(keys, 0)
    grant = await client.grant(reservation.reservation_id)
    with contextlib.closing(HandMadeSender(grant.messenger)) as sender:
        for layer in ALL_LAYERS:
            sender.write(grant, *entry_for(grant, keys[1], layer=layer))  # to the page of the first
            assert sender.receive() == WriteAck()
        assert (await client.stats()).num_sealed == 1
        sender.write(grant, *entry_for(grant, keys[0]))
        assert "are there already, and differ" in str(sender.receive())
        stats = await client.stats(check_integrity=True)
        assert (stats.num_sealed, stats.num_dropped, stats.integrity) == (0, 1, None)
    with pytest.raises(TransferError):
        await client.wait_arrived(reservation.reservation_id)
    await client.release(reservation.reservation_id)
    await until(client, unused)
    await client.close()


@pytest.mark.parametrize("in_parts", [False, True])
async def test_layer_that_lies_where_another_belongs_is_sealed_with_no_others(
    start_node: StartNode, in_parts: bool
) -> None:
    client = await start_node("decode").connect()
    keys = prompt_keys(2)
    reservation = await client.reserve(keys, 0)
    grant = await client.grant(reservation.reservation_id)
    with contextlib.closing(HandMadeSender(grant.messenger)) as sender:
        sender.open(grant)
        for key in (keys[1], keys[0]):  # both to the page of the first
            if in_parts:
                sender.write_part(grant, *part_for(grant, key, range(1)), (0, 1))
            else:
                sender.write(grant, *entry_for(grant, key))
        for layer in ALL_LAYERS[1:]:  # on their way already
            sender.write(grant, *entry_for(grant, keys[0], layer=layer))
        answers = [sender.receive() for _ in range(2 + len(ALL_LAYERS))]
        assert answers.count(WriteAck()) == 1
        assert sum("are there already, and differ" in str(answer) for answer in answers) == 2
        assert sum(isinstance(answer, TransferEnded) for answer in answers) == 1
        with pytest.raises(TransferError, match="differ"):
            await client.wait_arrived(reservation.reservation_id)
    await client.release(reservation.reservation_id)
    stats = await until(client, unused)
    assert (stats.num_sealed, stats.num_dropped) == (0, 0)
    await client.close()


async def test_strangers_at_one_port_keep_nobody_from_the_other(start_node: StartNode, memory: int) -> None:
    client = await start_node("decode").connect()
    address = (await client.grant((await client.reserve(prompt_keys(1), 0)).reservation_id)).messenger
    with contextlib.ExitStack() as open_files:
        strangers = [
            open_files.enter_context(socket.create_connection(address.tcp_endpoints[0], DEADLINE_S))
            for _ in range(MOST_UNKNOWN + 1)
        ]
        assert strangers[0].recv(1) == b""  # the oldest makes room
        await until(client, lambda stats: stats.num_unauthenticated == 1)
        sender = HandMadeSender(address, memory, MEMORY_BYTES)
        open_files.enter_context(sender.sock)
        assert isinstance(sender.welcome, Welcome)
    await client.close()


async def test_peer_that_speaks_another_protocol_is_dropped(start_node: StartNode) -> None:
    client = await start_node("decode").connect()
    with socket.create_connection(client.address.tcp_endpoints[0], DEADLINE_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):  # it may not have read all of ours
            assert sock.recv(1) == b""
    await client.stats(check_integrity=True)
    await client.close()


@pytest.mark.parametrize(
    ("heads", "changed", "complaint"),
    [
        ((1, 3), {}, "heads [1, 3) are no part of [0, 2)"),
        ((2, 3), {}, "heads [2, 3) are no part of [0, 2)"),
        ((-1, 1), {}, "heads [-1, 1) are no part of [0, 2)"),
        ((0, 1), {"layer_end": 2, "checksums": bytes(16)}, "some heads of 2 layers"),
        ((0, 1), {"layer_begin": 4, "layer_end": 5}, "are no part of [0, 4)"),
        ((0, 1), {"page": 1 << 40}, "is no part of grant"),
        ((0, 1), {"generation": 99}, "has generation"),
        ((0, 1), {"checksums": b""}, "bytes of checksums"),
    ],
)
async def test_part_outside_its_grant_is_refused_before_a_byte_is_placed(
    granted: Granted, heads: tuple[int, int], changed: dict[str, object], complaint: str
) -> None:
    client, key, _, grant = granted
    before = bytes(client.segment.buffer[client.segment.page_offset(0) :])
    with contextlib.closing(HandMadeSender(grant.messenger)) as sender:
        entry, _ = part_for(grant, key[0], range(1))
        entry = msgspec.structs.replace(entry, **changed)
        num_bytes = entry.num_layers * (heads[1] - heads[0]) * LAYOUT.head_bytes
        sender.write_part(grant, entry, bytes(num_bytes), heads)
        assert complaint in str(sender.receive())
        assert client.segment.buffer[client.segment.page_offset(0) :] == before


@pytest.mark.parametrize("heads", [None, (1, 1), (1, 0), (0, 1 << 62), (-(1 << 63), (1 << 64) - 1)])
async def test_heads_that_are_none_or_not_said_end_the_connection(
    granted: Granted, heads: tuple[int, int] | None
) -> None:
    client, key, reservation, grant = granted
    rank = msgspec.structs.replace(IDENTITY, layout=LAYOUT.of_heads(range(1)))
    with contextlib.closing(HandMadeSender(grant.messenger, identity=rank)) as sender:
        entry, data = part_for(grant, key[0], range(1))
        sender.send(Write(1, grant.grant_id, [entry], heads), data)
        assert sender.is_dropped()
    await client.release(reservation.reservation_id)
    assert (await until(client, unused)).num_sealed == 0


async def test_layer_is_there_when_its_parts_are_and_none_is_written_twice(granted: Granted) -> None:
    client, key, reservation, grant = granted
    page = reservation.blocks[0].page
    with contextlib.closing(HandMadeSender(grant.messenger)) as sender:
        (first, first_bytes), (last, last_bytes) = (
            part_for(grant, key[0], heads) for heads in (range(1), range(1, 2))
        )

        def answer(entry: WriteEntry, data: bytes, heads: tuple[int, int]) -> str:
            sender.write_part(grant, entry, data, heads)
            return str(sender.receive())

        placed = str(WriteAck())
        assert answer(last, last_bytes, (1, 2)) == placed
        assert answer(last, last_bytes, (1, 2)) == placed  # the acknowledgement may have been lost
        assert "were written before" in answer(*entry_for(grant, key[0]), (0, 2))
        assert client.segment.layer_view(page, 0) == bytes(len(first_bytes)) + last_bytes
        assert answer(first, first_bytes, (0, 1)) == placed
        assert client.segment.layer_view(page, 0) == first_bytes + last_bytes
        # The whole layer is there now, in whichever way it comes again.
        assert answer(last, last_bytes, (1, 2)) == placed
        assert answer(*entry_for(grant, key[0]), (0, 2)) == placed
        assert client.segment.layer_view(page, 0) == first_bytes + last_bytes
        for layer in ALL_LAYERS[1:]:
            sender.write(grant, *entry_for(grant, key[0], layer=layer))
            assert sender.receive() == WriteAck()
    await client.wait_arrived(reservation.reservation_id)
    await client.release(reservation.reservation_id)
    assert await client.verify(key) == []


async def test_part_cannot_join_a_layer_that_is_being_received_whole(granted: Granted) -> None:
    client, key, _, grant = granted
    session = bytes(16)
    with (
        contextlib.closing(HandMadeSender(grant.messenger, session=session)) as whole,
        contextlib.closing(HandMadeSender(grant.messenger, session=session, lane=1)) as part,
    ):
        entry, data = entry_for(grant, key[0])
        whole.write(grant, entry, data[:100])
        while client.segment.layer_view(entry.page, 0)[:100] != data[:100]:
            await client.stats(check_integrity=True)
        part.write_part(grant, *part_for(grant, key[0], range(1)), (0, 1))
        assert "were written before" in str(part.receive())
        whole.sock.sendall(data[100:])
        assert whole.receive() == WriteAck()


async def test_part_that_does_not_come_whole_can_come_again(granted: Granted) -> None:
    client, key, _, grant = granted
    session = bytes(16)
    with contextlib.closing(HandMadeSender(grant.messenger, session=session)) as sender:
        entry, data = part_for(grant, key[0], range(1))
        with contextlib.closing(HandMadeSender(grant.messenger, session=session, lane=1)) as lost:
            lost.send(Write(1, grant.grant_id, [entry], (0, 1)), data[:100], len(data))
            while client.segment.layer_view(entry.page, 0)[:100] != data[:100]:
                await client.stats(check_integrity=True)
        sender.send(Abandon(1))
        for heads in (range(1), range(1, 2)):
            sender.write_part(grant, *part_for(grant, key[0], heads), (heads.start, heads.stop))
            assert sender.receive() == WriteAck()
        assert client.segment.layer_view(entry.page, 0) == entry_for(grant, key[0])[1]


async def test_corrupted_part_fails_the_grant(granted: Granted) -> None:
    client, key, reservation, grant = granted
    with contextlib.closing(HandMadeSender(grant.messenger)) as sender:
        sender.open(grant)
        sender.write_part(grant, *part_for(grant, key[0], range(1)), (0, 1))
        assert sender.receive() == WriteAck()
        entry, data = part_for(grant, key[0], range(1, 2))
        sender.write_part(grant, entry, data[:-1] + bytes([data[-1] ^ 1]), (1, 2))
        answer = sender.receive()
        assert isinstance(answer, WriteAck)
        assert answer.refusal is RefusalKind.CORRUPT
        with pytest.raises(TransferError, match=r"checksum of page .* does not match"):
            await client.wait_arrived(reservation.reservation_id)
    await client.release(reservation.reservation_id)
    assert (await until(client, unused)).num_sealed == 0


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
async def test_lying_peer_loses_its_connection_and_does_no_harm(
    granted: Granted, memory: int, lie: str
) -> None:
    client, key, reservation, grant = granted
    entry, data = entry_for(grant, key[0])
    match lie:
        case "segment without descriptor":
            sender = HandMadeSender(grant.messenger, None, MEMORY_BYTES)
        case "negative segment":
            sender = HandMadeSender(grant.messenger, memory, -1)
        case "segment beyond its descriptor":
            sender = HandMadeSender(grant.messenger, memory, MEMORY_BYTES + 1)
        case "payload over shared memory":
            sender = HandMadeSender(grant.messenger, memory, MEMORY_BYTES)
            sender.write(grant, entry, data)
        case "source outside the segment" | "negative source":
            sender = HandMadeSender(grant.messenger, memory, MEMORY_BYTES)
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
    await client.release(reservation.reservation_id)
    assert (await until(client, unused)).num_sealed == 0


async def test_write_over_shared_memory_that_comes_again_is_acknowledged_and_not_placed(
    granted: Granted, memory: int
) -> None:
    client, key, _, grant = granted
    entry, data = entry_for(grant, key[0])
    os.pwrite(memory, data, 0)
    sender = HandMadeSender(grant.messenger, memory, MEMORY_BYTES)
    sender.send(Write(1, grant.grant_id, [entry]))
    assert sender.receive() == WriteAck()
    os.pwrite(memory, bytes(len(data)), 0)
    sender.send(Write(1, grant.grant_id, [entry]))
    assert sender.receive() == WriteAck()
    assert client.segment.layer_view(entry.page, 0) == data
    sender.sock.close()
