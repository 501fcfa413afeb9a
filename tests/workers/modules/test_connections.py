"""Who may reach a helper from another host: what is proved, what is refused, for how long it may take."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import msgspec
import pytest

from messenger.transport.listeners import listen_tcp
from mooncake.errors import TransferError
from mooncake.security.greeting import MODULES, POOL, Challenge, GreetingClient
from mooncake.security.keys import ClusterKey
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S
from workers.errors import ModulesStayError
from workers.modules import connections
from workers.modules.connections import Owners, connect, receive, send
from workers.modules.link_messages import LONGEST_MESSAGE_BYTES, Join, Purpose

JOIN = Join(b"token", Purpose.PAGES)


class Served:
    """A listener that keeps what authenticated peers say first."""

    def __init__(self, port: int) -> None:
        self.port, self.endpoint = port, f"tcp://127.0.0.1:{port}"
        self.first: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(self, sock: socket.socket, first: bytes) -> None:
        self.first.put_nowait(first)

    async def knock(self) -> socket.socket:
        """A connection that has said nothing."""
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return sock


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Served]:
    with listen_tcp("127.0.0.1", 0) as listener:
        made = Served(listener.getsockname()[1])
        owners = Owners(listener, CLUSTER_KEY)
        task = asyncio.create_task(owners.run(lambda sock, first: made.serve(sock, first)))
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield made
        finally:
            task.cancel()
            await asyncio.wait([task])


async def is_closed(sock: socket.socket) -> bool:
    """Wait for the end of a connection, on which nothing comes before."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    return True


async def test_an_owner_with_the_key_is_heard() -> None:
    async with served() as at:
        with await connect(at.endpoint, CLUSTER_KEY) as sock:
            await send(sock, JOIN)
            assert msgspec.msgpack.decode(await at.first.get(), type=Join) == JOIN


async def test_an_owner_with_another_key_learns_so_and_is_not_heard() -> None:
    async with served() as at:
        with pytest.raises(ModulesStayError, match="another cluster key"):
            await connect(at.endpoint, ClusterKey.generate())
        assert at.first.empty()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 257) + bytes(257),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 0),
    ],
    ids=["http", "2 GiB", "long", "no message", "empty"],
)
async def test_a_peer_that_greets_wrongly_is_disconnected(said: bytes) -> None:
    async with served() as at:
        with await at.knock() as sock:
            await asyncio.get_running_loop().sock_sendall(sock, said)
            assert await is_closed(sock)


async def test_a_proof_for_a_pool_is_none_for_a_helper() -> None:
    async with served() as at:
        with await at.knock() as sock:
            client = GreetingClient(CLUSTER_KEY, POOL)
            await send(sock, client.greeting)
            challenge = msgspec.msgpack.decode(await receive(sock), type=Challenge)
            assert client.answer(challenge) is None
            other = GreetingClient(CLUSTER_KEY, MODULES)
            assert other.answer(challenge) is None, "it is of use with its own nonce only"


async def test_a_silent_peer_is_disconnected_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GREETING_TIMEOUT_S", 0.05)
    async with served() as at:
        with await at.knock() as sock:
            assert await is_closed(sock)


async def test_silent_peers_above_the_limit_end_the_oldest_and_an_owner_is_heard() -> None:
    async with served() as at:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(await at.knock()) for _ in range(65)]
            assert await is_closed(silent[0])
            with await connect(at.endpoint, CLUSTER_KEY) as sock:
                await send(sock, JOIN)
                assert await at.first.get()


async def test_an_end_in_the_middle_of_a_message_is_the_end_and_a_long_one_an_error() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        near.sendall(struct.pack("<I", 8) + b"half")
        near.shutdown(socket.SHUT_WR)
        assert await receive(far) == b""
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        near.sendall(struct.pack("<I", LONGEST_MESSAGE_BYTES + 1))
        with pytest.raises(TransferError, match="at most 65536"):
            await receive(far)


async def test_a_host_that_answers_no_packet_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT_S", 0.05)
    with socket.socket() as listener, socket.socket() as first:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        first.connect(listener.getsockname())  # so that packets of further ones are dropped
        with pytest.raises(TransferError, match=r"no connection within 0\.05 s; check that the host is up"):
            await connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", CLUSTER_KEY)


async def test_a_helper_that_says_nothing_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT_S", 0.05)
    with (
        listen_tcp("127.0.0.1", 0) as listener,
        pytest.raises(TransferError, match=r"no connection within 0\.05 s"),
    ):
        await connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", CLUSTER_KEY)


@pytest.mark.parametrize("error", [TimeoutError("ETIMEDOUT"), OSError(113, "no route to host")])
async def test_an_owner_that_vanishes_ends_no_other_connection(error: OSError) -> None:
    async with served() as at:
        good = at.serve

        async def fail(sock: socket.socket, first: bytes) -> None:
            await good(sock, first)
            raise error

        at.serve = fail  # type: ignore[method-assign]
        for _ in range(2):
            with await connect(at.endpoint, CLUSTER_KEY) as sock:
                await send(sock, JOIN)
                assert await at.first.get()
                assert await is_closed(sock)
