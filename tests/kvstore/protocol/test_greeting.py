"""Who is let in by the pool's TCP door, and whom its clients talk to."""

import asyncio
import contextlib
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Never

import msgspec
import pytest

from kvstore.client.client import KVCachePool
from kvstore.protocol.answers import Connected
from kvstore.protocol.calls import Connect
from kvstore.protocol.frames import MAX_GREETING_BYTES, FrameBuffer, encode_frame
from kvstore.server.remote import serve_client
from messenger.receiver import receiver
from messenger.receiver.receiver import UnauthenticatedPeers
from messenger.transport.stream import Stream
from messenger.transport.transports import Traffic
from mooncake.errors import ConfigError, PoolError
from mooncake.messages.pools import MessengerAddress
from mooncake.security.greeting import POOL, Challenge, Greeting, GreetingClient, GreetingServer, Proof
from mooncake.security.keys import ClusterKey
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, FINGERPRINT, LAYOUT
from tests.kvstore.pools import Pool, Pools, block_of, buffers, key_file_in, keys_of, until

pytestmark = pytest.mark.cluster

WRONG_KEY = ClusterKey.generate()
CONNECT = Connect(1, FINGERPRINT, LAYOUT, 1)
ADDRESS = MessengerAddress("here", 1, "host", "", (), ("", ""))


# -- what is proved ---------------------------------------------------------------------------------


def test_both_ends_with_the_key_are_satisfied() -> None:
    client = GreetingClient(CLUSTER_KEY, POOL)
    pool = GreetingServer(CLUSTER_KEY, POOL, client.greeting)
    proof = client.answer(pool.challenge)
    assert proof is not None
    assert pool.admits(proof)


def test_pool_with_another_key_is_given_no_proof() -> None:
    client = GreetingClient(CLUSTER_KEY, POOL)
    assert client.answer(GreetingServer(WRONG_KEY, POOL, client.greeting).challenge) is None


def test_proof_is_of_use_on_no_other_connection() -> None:
    client, other = GreetingClient(CLUSTER_KEY, POOL), GreetingClient(CLUSTER_KEY, POOL)
    pool = GreetingServer(CLUSTER_KEY, POOL, client.greeting)
    proof = client.answer(pool.challenge)
    assert proof is not None
    assert not GreetingServer(CLUSTER_KEY, POOL, client.greeting).admits(proof)
    assert other.answer(pool.challenge) is None


def test_proof_of_one_side_is_none_of_the_other_even_with_the_same_nonces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secrets, "token_bytes", bytes)
    pool = GreetingServer(CLUSTER_KEY, POOL, GreetingClient(CLUSTER_KEY, POOL).greeting)
    assert not pool.admits(Proof(pool.challenge.proof))


# -- strangers at the door, which is served by this process -----------------------------------------


class ServedPool:
    """A pool that no unauthenticated peer may reach."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.traffic = Traffic()
        self.num_admitted = 0

    def admit(self, connect: Connect, *_: object) -> Never:
        self.num_admitted += 1
        raise PoolError("closed for everybody")

    def visit(self, speak: Callable[[socket.socket], None]) -> bytes:
        """What is said to somebody who does `speak`, until he is hung up on."""

        def talk(sock: socket.socket) -> bytes:
            sock.settimeout(DEADLINE_S)
            heard = b""
            with sock, contextlib.suppress(ConnectionError):
                speak(sock)
                while piece := sock.recv(1 << 16):
                    heard += piece
            return heard

        async def serve() -> bytes:
            ours, theirs = socket.socketpair()
            async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as tasks:
                talking = tasks.create_task(asyncio.to_thread(talk, theirs))
                await serve_client(
                    Stream(ours),
                    self.admit,
                    tasks,
                    CLUSTER_KEY,
                    self.traffic,
                    UnauthenticatedPeers(),
                    timeout_s=self.timeout_s,
                )
            return talking.result()

        return asyncio.run(serve())


def challenge_on(sock: socket.socket, greeting: Greeting) -> Challenge:
    """What the pool answers to `greeting`."""
    sock.sendall(encode_frame(greeting))
    frames = FrameBuffer()
    while (room := frames.room_for_message()) is not None:
        num_bytes = sock.recv_into(room)
        assert num_bytes, "the pool has hung up"
        frames.received(num_bytes)
    return msgspec.msgpack.decode(frames.take_message()[0], type=Challenge)


def says_nothing(sock: socket.socket) -> None:
    pass


def hangs_up(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def drips(sock: socket.socket) -> None:
    """Never stops for long, and never ends his greeting."""
    pause = threading.Event()
    for byte in encode_frame(GreetingClient(CLUSTER_KEY, POOL).greeting)[:-1]:
        sock.sendall(bytes([byte]))
        pause.wait(0.02)


def greets_and_falls_silent(sock: socket.socket) -> None:
    challenge_on(sock, GreetingClient(CLUSTER_KEY, POOL).greeting)


def greets_and_hangs_up(sock: socket.socket) -> None:
    challenge_on(sock, GreetingClient(CLUSTER_KEY, POOL).greeting)
    sock.shutdown(socket.SHUT_WR)


def has_another_key(sock: socket.socket) -> None:
    client = GreetingClient(WRONG_KEY, POOL)
    nonce = challenge_on(sock, client.greeting).nonce
    proof = Proof(WRONG_KEY.proof(b"pool client", nonce, client.greeting.nonce))
    sock.sendall(encode_frame(proof) + encode_frame(CONNECT))


def throws_the_proof_back(sock: socket.socket) -> None:
    challenge = challenge_on(sock, GreetingClient(CLUSTER_KEY, POOL).greeting)
    sock.sendall(encode_frame(Proof(challenge.proof)) + encode_frame(CONNECT))


def connects_without_a_proof(sock: socket.socket) -> None:
    challenge_on(sock, GreetingClient(CLUSTER_KEY, POOL).greeting)
    sock.sendall(encode_frame(CONNECT))


def sends(data: bytes) -> Callable[[socket.socket], None]:
    return lambda sock: sock.sendall(data)


GREETING = GreetingClient(CLUSTER_KEY, POOL).greeting
LARGEST = struct.pack("<IQ", MAX_GREETING_BYTES, 0) + b"\xc1" * MAX_GREETING_BYTES
STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "says nothing": says_nothing,
    "hangs up": hangs_up,
    "drips": drips,
    "greets and falls silent": greets_and_falls_silent,
    "greets and hangs up": greets_and_hangs_up,
    "another key": has_another_key,
    "throws the proof back": throws_the_proof_back,
    "no greeting": sends(encode_frame(CONNECT)),
    "no proof": connects_without_a_proof,
    "http": sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "no msgpack": sends(struct.pack("<IQ", 3, 0) + b"\xc1\xc1\xc1"),
    "garbage before the greeting": sends(b"x" + encode_frame(GREETING)),
    "short nonce": sends(encode_frame(Greeting(bytes(31)))),
    "long nonce": sends(encode_frame(Greeting(bytes(33)))),
    "greeting with a payload": sends(encode_frame(GREETING, 5) + b"12345"),
    "greeting without end": sends(struct.pack("<IQ", 1 << 31, 0)),
    "oversized greeting": sends(struct.pack("<IQ", MAX_GREETING_BYTES + 1, 0)),
    "garbage of the largest size": sends(LARGEST),
    "much more than a greeting": sends(encode_frame(CONNECT) + bytes(1 << 20)),
}


@pytest.mark.parametrize("speak", STRANGERS.values(), ids=STRANGERS)
def test_stranger_is_hung_up_on_and_counted_once(speak: Callable[[socket.socket], None]) -> None:
    door = ServedPool(timeout_s=0.5)
    heard = door.visit(speak)
    assert heard == b""  # but for a challenge that was asked for
    assert door.traffic.num_unauthenticated == 1
    assert door.num_admitted == 0


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    door = ServedPool(timeout_s=DEADLINE_S)
    for _ in range(9):
        door.visit(sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert door.traffic.num_unauthenticated == 9
    assert [record.args[0] for record in caplog.records if record.args] == [1, 2, 4, 8]  # type: ignore[index]


def connects(sock: socket.socket) -> None:
    client = GreetingClient(CLUSTER_KEY, POOL)
    proof = client.answer(challenge_on(sock, client.greeting))
    assert proof is not None
    sock.sendall(encode_frame(proof) + encode_frame(CONNECT))  # in one piece


def test_who_has_the_key_is_heard_and_not_counted() -> None:
    door = ServedPool(timeout_s=DEADLINE_S)
    assert b"closed for everybody" in door.visit(connects)
    assert (door.num_admitted, door.traffic.num_unauthenticated) == (1, 0)


def test_nobody_is_heard_while_too_many_have_not_said_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "MOST_UNKNOWN", 0)
    door = ServedPool(timeout_s=DEADLINE_S)
    assert (
        door.visit(sends(encode_frame(GreetingClient(CLUSTER_KEY, POOL).greeting))) == b""
    )  # and no challenge
    assert (door.num_admitted, door.traffic.num_unauthenticated) == (0, 1)


def test_who_has_the_key_and_then_falls_silent_is_no_stranger() -> None:
    door = ServedPool(timeout_s=3.0)

    def prove(sock: socket.socket) -> None:
        client = GreetingClient(CLUSTER_KEY, POOL)
        proof = client.answer(challenge_on(sock, client.greeting))
        assert proof is not None
        sock.sendall(encode_frame(proof))

    assert door.visit(prove) == b""
    assert (door.num_admitted, door.traffic.num_unauthenticated) == (0, 0)


# -- strangers at a messenger's door ----------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pools(tmp_path_factory.mktemp("greeting")) as pools:
        yield pools.start("far")


def connection_to(pool: Pool) -> socket.socket:
    host, port = pool.tcp.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def num_unauthenticated(client: KVCachePool) -> int:
    (stats,) = client.stats().values()
    return stats.num_unauthenticated


def test_conversation_of_an_earlier_connection_opens_nothing(pool: Pool) -> None:
    with pool.client() as client:
        before = num_unauthenticated(client)
        visiting = GreetingClient(CLUSTER_KEY, POOL)
        with connection_to(pool) as sock:
            proof = visiting.answer(challenge_on(sock, visiting.greeting))
            assert proof is not None
            rest = encode_frame(proof) + encode_frame(CONNECT)
            sock.sendall(rest)
            assert Connected.__name__.encode() in sock.recv(1 << 16)  # it was a good one
        with connection_to(pool) as sock:
            challenge_on(sock, visiting.greeting)
            sock.sendall(rest)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1 << 16) == b""
        until(client, lambda stats: stats.num_unauthenticated == before + 1)


def test_client_with_another_key_is_counted_once(pool: Pool, tmp_path: Path) -> None:
    WRONG_KEY.save(tmp_path / "wrong.key")
    with pool.client() as client:
        before = num_unauthenticated(client)
        with pytest.raises(ConfigError, match="another cluster key"):
            KVCachePool.connect(pool.tcp, key_file=tmp_path / "wrong.key")
        until(client, lambda stats: stats.num_unauthenticated == before + 1)
        with pool.client(pool.tcp) as there:
            assert num_unauthenticated(there) == before + 1


def test_client_is_served_while_strangers_hammer_the_door(pool: Pool) -> None:
    num_hammered = [0] * 4
    is_over = threading.Event()
    attacks = [
        sends(struct.pack("<IQ", 1 << 31, 0)),
        sends(encode_frame(CONNECT) + bytes(1 << 16)),
        has_another_key,
        hangs_up,
    ]

    def hammer(index: int) -> None:
        while not is_over.is_set():
            with connection_to(pool) as sock, contextlib.suppress(ConnectionError):
                attacks[index](sock)
                while sock.recv(1 << 16):
                    pass
            num_hammered[index] += 1

    with pool.client() as here, ThreadPoolExecutor(len(attacks)) as threads:
        before = num_unauthenticated(here)
        hammering = [threads.submit(hammer, index) for index in range(len(attacks))]
        try:
            num_rounds = 0
            while num_rounds < 100 or min(num_hammered) < 10:
                with pool.client(pool.tcp) as client:
                    keys = keys_of(2)
                    client.put(keys, [block_of(key) for key in keys])
                    out = buffers(2)
                    assert client.get(keys, out) == [True, True]
                    assert out == [block_of(key) for key in keys]
                num_rounds += 1
        finally:
            is_over.set()
        for done in hammering:
            done.result(DEADLINE_S)
        until(here, lambda stats: stats.num_unauthenticated == before + sum(num_hammered))


# -- strangers in the place of a pool ---------------------------------------------------------------


class Impostor:
    """Accepts one client at the address of a pool, and says what `speak` does to its greeting."""

    def __init__(self, speak: Callable[[socket.socket, Greeting], None]) -> None:
        self._speak = speak
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = ThreadPoolExecutor(1)
        self._serving = self._threads.submit(self._serve)

    def heard_after_the_greeting(self) -> bytes:
        """What the client said, until it hung up."""
        return self._serving.result(DEADLINE_S)

    def _serve(self) -> bytes:
        sock, _ = self._listener.accept()
        sock.settimeout(DEADLINE_S)
        heard = b""
        with sock, contextlib.suppress(ConnectionError):
            frames = FrameBuffer()
            while (room := frames.room_for_message()) is not None:
                frames.received(sock.recv_into(room))
            self._speak(sock, msgspec.msgpack.decode(frames.take_message()[0], type=Greeting))
            while piece := sock.recv(1 << 16):
                heard += piece
        return heard

    def close(self) -> None:
        self._listener.close()
        self._threads.shutdown()


def answers_under_another_key(sock: socket.socket, greeting: Greeting) -> None:
    sock.sendall(encode_frame(GreetingServer(WRONG_KEY, POOL, greeting).challenge))


def answers_as_on_another_connection(sock: socket.socket, greeting: Greeting) -> None:
    sock.sendall(
        encode_frame(GreetingServer(CLUSTER_KEY, POOL, GreetingClient(CLUSTER_KEY, POOL).greeting).challenge)
    )


@pytest.mark.parametrize("speak", [answers_under_another_key, answers_as_on_another_connection])
def test_impostor_is_given_no_proof(tmp_path: Path, speak: Callable[[socket.socket, Greeting], None]) -> None:
    with contextlib.closing(Impostor(speak)) as impostor:
        with pytest.raises(ConfigError, match=f"the pool at {impostor.address} has another cluster key"):
            KVCachePool.connect(impostor.address, key_file=key_file_in(tmp_path))
        assert impostor.heard_after_the_greeting() == b""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (struct.pack("<IQ", MAX_GREETING_BYTES + 1, 0), "a message of 4097 bytes, the limit is 4096"),
        (encode_frame(Challenge(bytes(32), bytes(32)), 1 << 40), "it must have none"),
        (encode_frame(Challenge(bytes(31), bytes(32))), "length >= 32"),
        (encode_frame(Greeting(bytes(32))), "Invalid value 'Greeting'"),
        (encode_frame(Connected(1, ADDRESS, FINGERPRINT, LAYOUT)), "Invalid value 'Connected'"),
    ],
)
def test_what_no_pool_answers_to_a_greeting_is_an_error(tmp_path: Path, answer: bytes, reason: str) -> None:
    with contextlib.closing(Impostor(lambda sock, _: sock.sendall(answer))) as impostor:
        with pytest.raises(PoolError, match=f"{impostor.address} answered what it should not: .*{reason}"):
            KVCachePool.connect(impostor.address, key_file=key_file_in(tmp_path))
        assert impostor.heard_after_the_greeting() == b""


def test_pool_that_drips_is_given_up(tmp_path: Path) -> None:
    def drip(sock: socket.socket, greeting: Greeting) -> None:
        pause = threading.Event()
        for byte in encode_frame(GreetingServer(CLUSTER_KEY, POOL, greeting).challenge):
            sock.sendall(bytes([byte]))
            pause.wait(0.02)

    with (
        contextlib.closing(Impostor(drip)) as impostor,
        pytest.raises(PoolError, match=r"has not proved within 0\.5 s that it is a pool"),
    ):
        KVCachePool.connect(impostor.address, key_file=key_file_in(tmp_path), timeout_s=0.5)
