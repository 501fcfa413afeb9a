"""A socket that everybody may use takes few peers at once."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest
import zmq
import zmq.asyncio

from kvstore.events import open_peers
from kvstore.events.open_peers import OpenPeers
from tests.deadline import DEADLINE_S

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@contextlib.contextmanager
def open_socket() -> Iterator[tuple[zmq.asyncio.Socket, int]]:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as bound:
        bound.linger = 0
        peers = OpenPeers(bound)
        port = bound.bind_to_random_port("tcp://127.0.0.1")
        try:
            yield bound, port
        finally:
            peers.close()


def ends(peer: socket.socket) -> None:
    """Returns when the other side has ended the connection."""
    peer.settimeout(DEADLINE_S)
    with contextlib.suppress(ConnectionError):
        while peer.recv(1000):
            pass


def say_much(peer: socket.socket) -> None:
    """A message of frames of nothing, behind each of which there is more."""
    peer.settimeout(DEADLINE_S)
    peer.sendall(GREETING + READY)
    answer = b""
    while b"READY" not in answer:
        answer += peer.recv(1000)
    with contextlib.suppress(ConnectionError):
        peer.sendall(b"\x01\x00" * (1 << 20))


async def test_a_message_without_end_ends_its_connection() -> None:
    with open_socket() as (_, port), socket.create_connection(("127.0.0.1", port)) as peer:
        await asyncio.to_thread(say_much, peer)
        await asyncio.to_thread(ends, peer)


async def test_one_peer_too_many_puts_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_peers, "MOST_OPEN", 3)
    with open_socket() as (bound, port), contextlib.ExitStack() as stack:
        address = ("127.0.0.1", port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        router = stack.enter_context(zmq.asyncio.Context.instance().socket(zmq.DEALER))
        router.linger = 0
        router.connect(f"tcp://127.0.0.1:{port}")
        await router.send(b"12345678")
        _, request = await bound.recv_multipart()
        assert request == b"12345678"
        await asyncio.to_thread(ends, silent[0])
