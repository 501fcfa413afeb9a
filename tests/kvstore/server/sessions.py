"""Clients whose messages tests write by hand, and sessions in this process."""

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable

import msgspec

from kvstore.protocol.answers import (
    Detached,
    FromPool,
    Reservation,
    Stats,
)
from kvstore.protocol.calls import MAX_MESSAGE_BYTES, SPOKEN, Commit, Connect, GetStats, ReservePages
from kvstore.server.client_session import ClientSession, User
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import PoolStats
from tests.kvstore.nodes import DEADLINE_S, FINGERPRINT, LAYOUT, Node, prompt_keys
from tests.kvstore.tiers import Running, until

NUM_PAGES = 16
KEYS = prompt_keys(8)
BAD_KEYS = [[b""], [bytes(15)], [bytes(17)], [KEYS[0], bytes(1000)]]
ALL_LAYERS = range(LAYOUT.num_layers)


class HandMadeUser:
    """A client that sends any messages and reads the answers. Call ids are counted up."""

    def __init__(self, node: Node, serial: int = 1, versions: tuple[int, int] = SPOKEN) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(DEADLINE_S)
        while True:
            try:
                self.sock.connect(node.socket_path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert node.process is not None
                assert node.process.poll() is None
        self.first_answer = self.call(Connect(0, FINGERPRINT, LAYOUT, serial, True, *versions))

    def tell(self, message: msgspec.Struct | bytes) -> None:
        self.sock.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def hear(self) -> FromPool | None:
        """Return the next message; None when the connection has ended."""
        try:
            data, ancillary, _, _ = self.sock.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4))
        except ConnectionResetError:
            return None
        for _, _, descriptor in ancillary:
            os.close(array.array("i", descriptor)[0])
        return msgspec.msgpack.decode(data, type=FromPool) if data else None

    def call(self, message: msgspec.Struct) -> FromPool:
        """Send a call, and return its answer. No other message may come before it."""
        self.tell(message)
        answer = self.hear()
        assert answer is not None
        assert isinstance(answer, Detached) or answer.call_id == message.call_id  # type: ignore[attr-defined]
        return answer

    def stats(self) -> PoolStats:
        answer = self.call(GetStats(1, check_integrity=True))
        assert isinstance(answer, Stats)
        assert answer.stats.integrity is None
        return answer.stats

    def until(self, condition: Callable[[PoolStats], bool]) -> PoolStats:
        """Ask for counters again and again, and return the first ones that fulfil `condition`."""
        while not condition(stats := self.stats()):
            assert self.sock.gettimeout() == DEADLINE_S
        return stats

    def put(self, *keys: BlockKey) -> Reservation:
        """Seal blocks (with any bytes), and return their reservation."""
        reservation = self.call(ReservePages(1, list(keys), 0))
        assert isinstance(reservation, Reservation)
        pages = [block.page for block in reservation.blocks if not block.sealed]
        checksums = bytes(8 * LAYOUT.num_layers * len(pages))
        self.tell(Commit(reservation.reservation_id, 0, LAYOUT.num_layers, pages, checksums))
        return reservation

    def is_ended(self) -> Detached:
        """Return the reason why the session has ended. The connection must be closed then."""
        reason = self.hear()
        assert isinstance(reason, Detached)
        assert self.hear() is None
        return reason

    def close(self) -> None:
        self.sock.close()


Join = Callable[..., HandMadeUser]


class Answers:
    """The answers of a session, by call id."""

    def __init__(self) -> None:
        self.all: dict[int, FromPool] = {}

    def __call__(self, answer: FromPool) -> None:
        assert isinstance(answer, Detached) or answer.call_id not in self.all, "a call is answered once"
        if not isinstance(answer, Detached):
            self.all[answer.call_id] = answer

    async def to(self, call_id: int) -> FromPool:
        await until(lambda: call_id in self.all)
        return self.all[call_id]


@contextlib.asynccontextmanager
async def session(r: Running, owner: int = 5) -> AsyncIterator[tuple[ClientSession, Answers]]:
    answers = Answers()
    async with asyncio.TaskGroup() as tasks:
        session = ClientSession(User(owner, "a test", None), r.store, tasks, answers)
        try:
            yield session, answers
        finally:
            session.end()


async def on_ssd_only(r: Running, *keys: BlockKey) -> None:
    """Store blocks, and evict them from DRAM to SSD."""
    await r.put(*keys)
    reservation = await r.reserve([], r.pool.table.num_pages)
    r.pool.release(reservation.reservation_id)
