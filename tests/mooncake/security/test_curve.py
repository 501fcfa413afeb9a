"""Who has the cluster's key is served; whoever has not gets a closed connection, and is counted."""

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from zmq.utils import z85

from conductor.effects import ToConductor
from mooncake.bus.zeromq import Dealer, Router, peer_identity
from mooncake.messages.fronts import Cancel
from mooncake.messages.workers import ToWorker
from mooncake.security import curve, handshakes
from mooncake.security.curve import Gate, use_key
from mooncake.security.keys import ClusterKey
from tests.deadline import DEADLINE_S

KEY, OTHER_KEY = ClusterKey.generate(), ClusterKey.generate()
FRIEND = peer_identity("p0", 1)
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x00" + bytes(31)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def routing(endpoint: str) -> Iterator[Router[ToConductor]]:
    router: Router[ToConductor] = Router(endpoint, ToConductor, KEY)
    try:
        yield router
    finally:
        router.close()


@contextlib.contextmanager
def stranger(endpoint: str, prepare: Callable[[zmq.asyncio.Socket], None]) -> Iterator[None]:
    """A DEALER that says something well-formed."""
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as sock:
        sock.linger = 0
        prepare(sock)
        sock.connect(endpoint)
        sock.send(b"\x82\xa4type\xa6Cancel\xaarequest_id\xa1x")
        yield


async def assert_serves(router: Router[ToConductor], name: str) -> None:
    """A friend gets through, and nothing that others have sent is before it."""
    dealer: Dealer[ToWorker] = Dealer(router.endpoint, FRIEND, ToWorker, KEY)
    await dealer.send(Cancel(name))
    assert await router.recv() == (FRIEND, Cancel(name))
    dealer.close()


def knows_only_the_public_key(sock: zmq.asyncio.Socket) -> None:
    public, secret = zmq.curve_keypair()
    sock.curve_serverkey = KEY.curve_pair()[0]
    sock.curve_publickey, sock.curve_secretkey = public, secret


def shows_anothers_public_key(sock: zmq.asyncio.Socket) -> None:
    """What is not secret of the cluster's pair, with a secret key that does not belong to it."""
    public, _ = KEY.curve_pair()
    sock.curve_serverkey = sock.curve_publickey = public
    sock.curve_secretkey = z85.encode(random.randbytes(32))


STRANGERS: list[Callable[[zmq.asyncio.Socket], None]] = [
    lambda sock: None,
    lambda sock: use_key(sock, OTHER_KEY),
    knows_only_the_public_key,
    shows_anothers_public_key,
    lambda sock: sock.set(zmq.PLAIN_USERNAME, b"admin"),
]


@pytest.mark.parametrize("prepare", STRANGERS)
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
async def test_socket_without_the_key_is_refused(
    tmp_path: Path,
    transport: str,
    prepare: Callable[[zmq.asyncio.Socket], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/a"
    with routing(endpoint) as router:
        with stranger(router.endpoint, prepare):
            # One that wants no encryption may hang up on us before we have read what it wants.
            await until(lambda: router.num_refused + router.num_unfinished >= 1)
        await assert_serves(router, "after a stranger")
        assert "dropped a " not in caplog.text


def bytes_that_are_no_handshake() -> list[bytes]:
    draw = random.Random(4)
    contents = {
        "random": draw.randbytes(100_000),
        "random after ZMTP's first byte": b"\xff" + draw.randbytes(100_000),
        "random after ZMTP's greeting": ZMTP_GREETING + draw.randbytes(100_000),
        "a frame of a terabyte": ZMTP_GREETING + b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(1000),
        "a HELLO of nothing": ZMTP_GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
        "HTTP": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
    }
    return list(contents.values())


def throw(port: int, content: bytes) -> None:
    """Send it, and read until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
        with contextlib.suppress(OSError):  # closed on us while we still send
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while sock.recv(65536):
                pass


async def test_bytes_that_are_no_handshake_cost_a_closed_connection_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with routing("tcp://127.0.0.1:*") as router:
        port = int(router.endpoint.rpartition(":")[2])
        friend: Dealer[ToWorker] = Dealer(router.endpoint, FRIEND, ToWorker, KEY)
        await friend.send(Cancel("before"))
        assert await router.recv() == (FRIEND, Cancel("before"))
        for number, content in enumerate(bytes_that_are_no_handshake(), start=1):
            await asyncio.to_thread(throw, port, content)
            await until(lambda expected=number: router.num_refused == expected)  # type: ignore[misc]
        await friend.send(Cancel("after"))
        assert await router.recv() == (FRIEND, Cancel("after"))
        assert router.num_unfinished == 0
        assert "dropped a " not in caplog.text
        friend.close()


async def test_many_strangers_at_once_are_all_counted_and_friends_get_through() -> None:
    num_unauthenticated = 200

    def storm(port: int) -> None:
        for number in range(num_unauthenticated):
            sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
            with sock, contextlib.suppress(ConnectionError):
                sock.sendall(random.Random(number).randbytes(500))

    with routing("tcp://127.0.0.1:*") as router:
        thread = threading.Thread(target=storm, args=(int(router.endpoint.rpartition(":")[2]),))
        thread.start()
        for number in range(5):
            await assert_serves(router, f"during the storm {number}")
        await asyncio.to_thread(thread.join)
        await until(lambda: router.num_refused + router.num_unfinished == num_unauthenticated)


async def test_silent_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "HANDSHAKE_S", 0.1)
    with routing("tcp://127.0.0.1:*") as router:
        port = int(router.endpoint.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while await reader.read(1000):
            pass
        await until(lambda: router.num_unfinished == 1)
        writer.close()


async def test_peers_that_leave_in_the_middle_are_not_said_to_have_another_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody knows which they have: a process of this cluster on a busy machine is cut off like that too."""

    with caplog.at_level(logging.WARNING), routing("tcp://127.0.0.1:*") as router:
        port = int(router.endpoint.rpartition(":")[2])
        for number, content in enumerate([b"", b"\xff", ZMTP_GREETING] * 2, start=1):
            await asyncio.to_thread(throw, port, content)
            await until(lambda expected=number: router.num_unfinished == expected)  # type: ignore[misc]
        await until(lambda: "6 connections so far ended in the middle" in caplog.text)
        assert router.num_refused == 0
    assert "do not have this cluster's key" not in caplog.text


async def test_peer_gets_in_while_the_event_loop_is_busy(tmp_path: Path) -> None:
    """However long it is: who waits for its turn there has not shown another key."""
    with routing(f"ipc://{tmp_path}/a") as router:
        with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
            sock.linger = 0
            use_key(sock, KEY)
            with sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                sock.connect(router.endpoint)
                assert monitor.poll(int(1000 * DEADLINE_S)), "and nothing else runs in this loop"
            sock.disable_monitor()
        assert router.num_refused == router.num_unfinished == 0


async def test_crowd_of_silent_peers_makes_room_for_a_friend(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may be there at once, who would stay for an hour."""
    monkeypatch.setattr(curve, "HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(handshakes, "MOST_UNAUTHENTICATED", 8)
    with routing("tcp://127.0.0.1:*") as router, contextlib.ExitStack() as crowd:
        address = ("127.0.0.1", int(router.endpoint.rpartition(":")[2]))
        await assert_serves(router, "before")
        friend: Dealer[ToWorker] = Dealer(router.endpoint, FRIEND, ToWorker, KEY)
        await friend.send(Cancel("first"))
        assert await router.recv() == (FRIEND, Cancel("first"))
        silent = [crowd.enter_context(socket.create_connection(address)) for _ in range(20)]
        await until(lambda: router.num_unfinished == 12)
        await friend.send(Cancel("it is no part of the crowd"))
        assert await router.recv() == (FRIEND, Cancel("it is no part of the crowd"))
        friend.close()
        for sock in silent[:12]:
            sock.settimeout(DEADLINE_S)
            while sock.recv(1000):
                pass
        assert router.num_unfinished == 12, "the others may stay"


async def test_what_crosses_is_encrypted() -> None:
    """A relay between the two sees neither the message nor its sender."""
    seen = bytearray()

    with routing("tcp://127.0.0.1:*") as router:
        port = int(router.endpoint.rpartition(":")[2])

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    seen.extend(data)
                    writer.write(data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, upstream_writer), copy(upstream_reader, writer))

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        dealer: Dealer[ToWorker] = Dealer(endpoint, FRIEND, ToWorker, KEY)
        await dealer.send(Cancel("a secret prompt"))
        assert await router.recv() == (FRIEND, Cancel("a secret prompt"))
        dealer.close()
        server.close()
    assert b"CURVE" in seen
    assert not [word for word in (b"secret prompt", FRIEND, b"Cancel") if word in seen]


async def test_client_with_another_key_warns_and_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), routing("tcp://127.0.0.1:*") as router:
        dealer: Dealer[ToWorker] = Dealer(router.endpoint, FRIEND, ToWorker, OTHER_KEY)
        await until(lambda: f"{router.endpoint} has closed 3 connections" in caplog.text)
        dealer.close()
    assert f"key id {OTHER_KEY.key_id}" in caplog.text
    assert "security.key_file" in caplog.text
    assert "refused 1 connections so far" in caplog.text
    assert len(caplog.messages) < 10


async def test_client_does_not_talk_to_a_server_without_the_key(caplog: pytest.LogCaptureFixture) -> None:
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        impostor.curve_server = True
        impostor.curve_secretkey = OTHER_KEY.curve_pair()[1]
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        with socket.socket() as plain:
            plain.bind(("127.0.0.1", 0))
            plain.listen()
            plain.setblocking(False)
            dealers: list[Dealer[ToWorker]] = [
                Dealer(f"tcp://127.0.0.1:{number}", FRIEND, ToWorker, KEY)
                for number in (port, plain.getsockname()[1])
            ]
            for dealer in dealers:
                await dealer.send(Cancel("a secret prompt"))
            loop = asyncio.get_running_loop()
            connection, _ = await loop.sock_accept(plain)
            connection.setblocking(False)
            await loop.sock_sendall(connection, ZMTP_GREETING[:32] + b"\x01" + bytes(31))
            received = b""
            while len(received) < 64 + 202:  # greeting and HELLO; it then waits for the server's proof
                received += await loop.sock_recv(connection, 65536)
            connection.close()
            assert b"secret prompt" not in received
            assert FRIEND not in received
            await until(lambda: f"127.0.0.1:{port} has closed 3 connections" in caplog.text)
            assert not await impostor.poll(0)
            for dealer in dealers:
                dealer.close()


async def test_gates_with_different_keys_live_beside_each_other(tmp_path: Path) -> None:
    gates = {key: Gate(key, zmq.ROUTER) for key in (KEY, OTHER_KEY)}
    with zmq.asyncio.Context() as context:
        for key, gate in gates.items():
            server, client = gate.sockets[0], context.socket(zmq.DEALER)
            server.bind(f"ipc://{tmp_path}/{key.key_id}")
            use_key(client, key)
            client.linger = 0
            client.connect(f"ipc://{tmp_path}/{key.key_id}")
            await client.send(key.key_id.encode())
            assert (await server.recv_multipart())[1] == key.key_id.encode()
            client.close()
    for gate in gates.values():
        assert gate.num_refused == 0
        gate.close()
