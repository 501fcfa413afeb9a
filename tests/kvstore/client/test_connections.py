"""Answers that a real messenger gives rarely or never."""

import array
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvstore.client.client import KVCachePool
from kvstore.pool.segment import Segment
from kvstore.protocol.answers import (
    LOCATIONS,
    CallFailed,
    Connected,
    Count,
    Detached,
    Done,
    ErrorKind,
    FromPool,
    Located,
)
from kvstore.protocol.calls import AwaitSpace, Connect, Lookup, ReservePages, ToPool
from mooncake.errors import ConfigError, PoolError, PoolFullError, TransferError
from mooncake.messages.pools import MessengerAddress, Tier
from tests.kvstore.nodes import DEADLINE_S, FINGERPRINT, LAYOUT
from tests.kvstore.pools import block_of, keys_of

DECODER = msgspec.msgpack.Decoder(ToPool)
ADDRESS = MessengerAddress("fake", 1, "host", "", (), ("", ""))
DRAM = bytes([LOCATIONS.index(Tier.DRAM)])
Respond = Callable[[ToPool], Sequence[FromPool]]


class FakePool:
    """Greets every client and answers whatever `respond` says."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix:{path}"
        self.respond: Respond = lambda message: []
        self.messages: list[ToPool] = []
        self._memory = os.memfd_create("fake")
        os.posix_fallocate(self._memory, 0, 1 << 20)
        Segment.format(self._memory, FINGERPRINT, LAYOUT)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[sock], daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            while packet := sock.recv(1 << 20):
                message = DECODER.decode(packet)
                if isinstance(message, Connect):
                    connected = Connected(message.call_id, ADDRESS, FINGERPRINT, LAYOUT)
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._memory]))]
                    sock.sendmsg([msgspec.msgpack.encode(connected)], rights)
                    continue
                self.messages.append(message)
                for answer in self.respond(message):
                    sock.send(msgspec.msgpack.encode(answer))

    def close(self) -> None:
        self._listener.close()
        os.close(self._memory)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakePool]:
    fake = FakePool(tmp_path / "fake.sock")
    yield fake
    fake.close()


@pytest.fixture
def client(fake: FakePool) -> Iterator[KVCachePool]:
    with KVCachePool.connect(fake.address, timeout_s=DEADLINE_S) as client:
        yield client


def test_late_answers_to_other_calls_are_passed_over(fake: FakePool, client: KVCachePool) -> None:
    fake.respond = lambda message: [
        Done(-1),
        CallFailed(-2, ErrorKind.POOL, "late"),
        Located(id_of(message), DRAM),
    ]
    assert client.exists(keys_of(1)) == [Tier.DRAM]


def test_end_of_the_session_says_why_and_the_next_call_connects_again(
    fake: FakePool, client: KVCachePool
) -> None:
    fake.respond = lambda message: [Detached("enough")]
    with pytest.raises(PoolError, match="ended the session: enough"):
        client.exists(keys_of(1))
    fake.respond = lambda message: [Located(id_of(message), DRAM)]
    assert client.exists(keys_of(1)) == [Tier.DRAM]


def test_answer_of_another_kind_is_an_error_and_not_taken_for_one(
    fake: FakePool, client: KVCachePool
) -> None:
    fake.respond = lambda message: [Count(id_of(message), 3)]
    with pytest.raises(PoolError, match="answered what it should not: Count to Lookup"):
        client.exists(keys_of(1))


def test_silent_pool_is_given_up_after_the_timeout(fake: FakePool) -> None:
    with KVCachePool.connect(fake.address, timeout_s=0.05) as client:
        with pytest.raises(PoolError, match=r"no pool answers: unix:.* has been silent for 0\.05 s"):
            client.exists(keys_of(1))
        fake.respond = lambda message: [Located(id_of(message), DRAM)]
        assert client.exists(keys_of(1)) == [Tier.DRAM]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ErrorKind.POOL, PoolError),
        (ErrorKind.POOL_FULL, PoolFullError),
        (ErrorKind.TRANSFER, TransferError),
        (ErrorKind.CONFIG, ConfigError),
        (ErrorKind.MISMATCH, PoolError),  # without saying what differs
    ],
)
def test_failed_calls_raise_what_the_pool_says(
    fake: FakePool, client: KVCachePool, kind: ErrorKind, expected: type[Exception]
) -> None:
    fake.respond = lambda message: [CallFailed(id_of(message), kind, "this and that")]
    with pytest.raises(expected, match="this and that"):
        client.exists(keys_of(1))
    assert [type(message) for message in fake.messages] == [Lookup]


def test_who_gives_up_waiting_for_room_again_and_again_leaves_one_call_behind(
    fake: FakePool, client: KVCachePool
) -> None:
    def respond(message: ToPool) -> Sequence[FromPool]:
        if isinstance(message, ReservePages):
            return [CallFailed(message.call_id, ErrorKind.POOL_FULL, "no page", space_epoch=7)]
        return []

    fake.respond = respond
    (key,) = keys_of(1)
    for _ in range(3):
        with pytest.raises(PoolFullError, match="no page"):
            client.put([key], [block_of(key)], timeout_s=0.01)
    waits = [message for message in fake.messages if isinstance(message, AwaitSpace)]
    assert [wait.space_epoch for wait in waits] == [7]


def id_of(message: ToPool) -> int:
    call_id: int = message.call_id  # type: ignore[union-attr]
    return call_id
