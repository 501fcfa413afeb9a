"""Writes to a messenger by a peer that errs, lies or stops half-way."""

import contextlib
import os
import socket
import struct
from collections.abc import Callable

import msgspec
import pytest
import xxhash

from messenger.identity import Identity
from messenger.protocol import PROTOCOL_VERSION, Close, Hello, Message, Open, Write, WriteEntry, encode_frame
from mooncake.blocks import BlockKey
from mooncake.errors import PoolFullError
from mooncake.messages import Grant
from tests.kvstore.nodes import (
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    StartNode,
    assert_holds,
    block_bytes,
    prompt_keys,
    run,
    until,
    unused,
)

ALL_LAYERS = range(LAYOUT.num_layers)


class HandMadeSender:
    """A peer that says exactly what a test wants, when it wants. Over TCP unless it has a segment."""

    def __init__(self, grant: Grant, segment_fd: int | None = None, segment_bytes: int | None = None) -> None:
        address = grant.messenger
        if segment_fd is None:
            self.sock = socket.create_connection((address.tcp_host, address.tcp_port), DEADLINE_S)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(DEADLINE_S)
            self.sock.connect(address.unix_path)
        identity = Identity("hand-made", 1, "elsewhere", FINGERPRINT, LAYOUT)
        greeting: list[Message] = [
            Hello(PROTOCOL_VERSION, identity, segment_bytes),
            Open(1, grant.grant_id, "by hand"),
        ]
        data = b"".join(encode_frame(message) for message in greeting)
        socket.send_fds(self.sock, [data], [] if segment_fd is None else [segment_fd])

    def is_dropped(self) -> bool:
        """Reads until the receiver hangs up."""
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(4096):
                pass
        return True

    def write(self, entry: WriteEntry, payload: bytes) -> None:
        num_bytes = entry.num_layers * LAYOUT.layer_bytes
        self.sock.sendall(encode_frame(Write(1, [entry]), num_bytes) + payload)

    def receive(self) -> bytes:
        """The next frame but the receiver's hello, undecoded."""
        meta_bytes, _ = struct.unpack("<II", self.sock.recv(8, socket.MSG_WAITALL))
        meta = self.sock.recv(meta_bytes, socket.MSG_WAITALL)
        return self.receive() if b"Hello" in meta else meta


def entry_for(
    grant: Grant, key: BlockKey, *, layer: int = 0, generation: int = 0
) -> tuple[WriteEntry, bytes]:
    data = block_bytes(key, layer)
    page = grant.pages[0]
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
    return WriteEntry(page.page, page.generation + generation, layer, layer + 1, checksum, 0), data


@pytest.mark.parametrize("ending", ["bytes", "connection"])
def test_page_of_an_unfinished_write_is_quarantined_until_it_ends(start_node: StartNode, ending: str) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        key = prompt_keys(1)
        reservation = await client.reserve(key, 0)
        grant = await client.grant(reservation.reservation_id)
        sender = HandMadeSender(grant)
        entry, data = entry_for(grant, key[0])
        sender.write(entry, data[:100])
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
            assert b"revoked" in sender.receive() + sender.receive()
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
        (lambda e: WriteEntry(e.page, e.generation + 1, 0, 1, e.checksums, 0), b"has generation"),
        (lambda e: WriteEntry(e.page + 1, e.generation, 0, 1, e.checksums, 0), b"never part of grant"),
        (lambda e: WriteEntry(1 << 40, e.generation, 0, 1, e.checksums, 0), b"never part of grant"),
        (lambda e: WriteEntry(e.page, e.generation, 4, 5, e.checksums, 0), b"are no part of 4 layers"),
        (lambda e: WriteEntry(e.page, e.generation, -1, 0, e.checksums, 0), b"are no part of 4 layers"),
        (lambda e: WriteEntry(e.page, e.generation, 0, 1, b"", 0), b"bytes of checksums"),
    ],
)
def test_write_outside_its_grant_is_refused_before_a_byte_is_placed(
    start_node: StartNode, change: Callable[[WriteEntry], WriteEntry], complaint: bytes
) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        before = bytes(client.segment.buffer[client.segment.page_offset(0) :])
        key = prompt_keys(1)
        grant = await client.grant((await client.reserve(key, 0)).reservation_id)
        sender = HandMadeSender(grant)
        entry, data = entry_for(grant, key[0])
        sender.write(change(entry), data)
        assert complaint in sender.receive()
        assert client.segment.buffer[client.segment.page_offset(0) :] == before
        # The payload was drained: the connection goes on.
        sender.write(entry, data)
        assert b"refusal\xc0" in sender.receive()
        # What has arrived is not written again.
        sender.write(entry, bytes(len(data)))
        assert b"were written before" in sender.receive()
        assert client.segment.layer_view(entry.page, 0) == data
        sender.sock.close()
        await client.close()

    run(test())


def test_write_after_its_grant_ended_is_refused(start_node: StartNode) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        key = prompt_keys(1)
        reservation = await client.reserve(key, 0)
        grant = await client.grant(reservation.reservation_id)
        sender = HandMadeSender(grant)
        for layer in ALL_LAYERS:
            sender.write(*entry_for(grant, key[0], layer=layer))
            sender.receive()
        await client.wait_arrived(reservation.reservation_id)
        sender.write(entry_for(grant, key[0])[0], bytes(LAYOUT.layer_bytes))
        assert b"complete, revoked or of an earlier life" in sender.receive()
        assert_holds(client, reservation, key)
        sender.sock.sendall(encode_frame(Close(1, None)))
        sender.sock.close()
        await client.close()

    run(test())


def test_peer_that_speaks_another_protocol_is_dropped(start_node: StartNode) -> None:
    async def test() -> None:
        client = await start_node("decode").connect()
        with socket.create_connection((client.address.tcp_host, client.address.tcp_port), DEADLINE_S) as sock:
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
                sender = HandMadeSender(grant, None, 8192)
            case "negative segment":
                sender = HandMadeSender(grant, fd, -1)
            case "segment beyond its descriptor":
                sender = HandMadeSender(grant, fd, 8193)
            case "payload over shared memory":
                sender = HandMadeSender(grant, fd, 8192)
                sender.write(entry, data)
            case "source outside the segment" | "negative source":
                sender = HandMadeSender(grant, fd, 8192)
                entry = msgspec.structs.replace(entry, source_offset=-1 if lie == "negative source" else 8000)
                sender.sock.sendall(encode_frame(Write(1, [entry])))
            case "payload shorter than its pages":
                sender = HandMadeSender(grant)
                sender.sock.sendall(encode_frame(Write(1, [entry]), len(data) - 1))
            case _:
                sender = HandMadeSender(grant)
                sender.sock.sendall(encode_frame(Write(1, [])))
        assert sender.is_dropped()
        sender.sock.close()
        os.close(fd)
        await client.release(reservation.reservation_id)
        assert (await until(client, unused)).num_sealed == 0
        await client.close()

    run(test())
