"""More connections than a front has room for: the oldest that wait make room, and others are answered."""

import asyncio
import contextlib
import errno
import json
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from conductor.front.http import server, sharing
from conductor.front.http.connection import Connection
from conductor.front.http.handshakes import HandshakeTurns
from conductor.front.http.server import HttpServer, listen
from conductor.front.http.timers import Timeouts
from mooncake.messages.requests import Request
from tests.conductor.front.access.test_access import certificate
from tests.conductor.front.fakes import MODEL_NAME, FakeCluster, answer_hello, byte_model, running_front
from tests.deadline import DEADLINE_S

MOST = 8
COMPLETION = {"model": MODEL_NAME, "prompt": "hi", "max_tokens": 4}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MAX_WAITING", MOST)
    monkeypatch.setattr(sharing, "MAX_WAITING_TLS", MOST)


@contextlib.contextmanager
def connections(url: str, num: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        peers = []
        for _ in range(num):
            peer = stack.enter_context(
                socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), DEADLINE_S)
            )
            with contextlib.suppress(ConnectionError):
                peer.sendall(said)
            peers.append(peer)
        yield peers


def rest(peer: socket.socket) -> bytes:
    """What comes until the other side ends the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := peer.recv(1 << 16):
            data += piece
    return data


def answers(url: str, **options: Any) -> bool:
    answer = httpx.post(f"{url}/v1/completions", json=COMPLETION, timeout=DEADLINE_S, **options)
    assert answer.status_code == 200, answer.text
    return True


def test_idle_ones_make_room_and_one_that_is_answered_does_not(tmp_path: Path) -> None:
    body = json.dumps(COMPLETION).encode()
    ask = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with running_front(tmp_path, byte_model()) as front:
        is_due = asyncio.Event()

        async def answer_later(cluster: FakeCluster, request: Request) -> None:
            await is_due.wait()
            await answer_hello(cluster, request)

        front.cluster.behaviour = answer_later
        with connections(front.url, 1, ask) as [asking]:
            front.cluster.wait_until(lambda: bool(front.cluster.submitted))
            with connections(front.url, 3 * MOST) as idle:
                assert all(rest(peer) == b"" for peer in idle[:MOST])
                front.cluster.loop.call_soon_threadsafe(is_due.set)
                assert asking.recv(15) == b"HTTP/1.1 200 OK"
                assert answers(front.url)


def test_a_request_that_still_arrives_gets_a_503(tmp_path: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"
    with running_front(tmp_path, byte_model()) as front, connections(front.url, 1, head) as [arriving]:
        assert answers(front.url), "by which time the front has read what has come before"
        with connections(front.url, 2 * MOST):
            assert b" 503 " in rest(arriving)
            assert answers(front.url)


def test_one_that_has_had_its_answer_waits_again(tmp_path: Path) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running_front(tmp_path, byte_model()) as front, connections(front.url, 1, ask) as [served]:
        assert served.recv(15) == b"HTTP/1.1 200 OK"
        with connections(front.url, 2 * MOST):
            rest(served)
        assert answers(front.url)


def test_those_that_read_nothing_of_an_answer_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MAX_WAITING", 4 * MOST)
    monkeypatch.setattr(sharing, "MAX_STALLED", MOST)
    abort, has_ended = Connection.abort, threading.Event()

    def noted_abort(connection: Connection) -> None:
        abort(connection)
        has_ended.set()

    monkeypatch.setattr(Connection, "abort", noted_abort)
    ask = b"GET /docs/assets/swagger-ui-bundle.js HTTP/1.1\r\nHost: x\r\n\r\n"
    with running_front(tmp_path, byte_model()) as front, connections(front.url, 2 * MOST) as stalled:
        for peer in stalled:
            peer.sendall(ask * 10)
        assert has_ended.wait(DEADLINE_S)
        assert answers(front.url)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_handshake_that_does_not_end_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 10 * DEADLINE_S)
    trusted = ssl.create_default_context(cafile=certificate(tmp_path))
    paths = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with running_front(tmp_path, byte_model(), **paths) as front:
        for said in (b"", b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" + bytes(8000), b"GET / HTTP/1.1\r\n\r\n"):
            with connections(front.url, 3 * MOST, said) as halves:
                rest(halves[0])
                assert answers(front.url, verify=trusted)


async def test_where_there_are_no_descriptors_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio would tell thousands of times a second that there are none, and let nobody in."""
    listener = Mock(accept=Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    loop = Mock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    served = HttpServer(Mock(), listener, Timeouts(1.0, 1.0, 1.0), 1)
    old, new = Mock(), Mock()
    for connection in (old, new):
        served.connections.accepted(connection)
    served.start()
    [[_, accept]] = [call.args for call in loop.add_reader.call_args_list]
    accept()
    assert [connection.make_room.called for connection in (old, new)] == [True, False]
    loop.call_later.assert_not_called()
    served.connections.is_served(new)
    accept()
    loop.remove_reader.assert_called_once_with(listener)
    loop.call_later.assert_called_once()


async def test_a_connection_that_is_cancelled_as_soon_as_it_is_accepted_is_closed() -> None:
    is_accepted = asyncio.Event()
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        noting = Mock(wraps=listener)

        def accept() -> tuple[socket.socket, Any]:
            is_accepted.set()
            return listener.accept()

        noting.accept.side_effect = accept
        served = HttpServer(Mock(), noting, Timeouts(1.0, 1.0, 1.0), 1)
        served.start()
        await is_accepted.wait()
        await served.abort()
        served.close()
        async with asyncio.timeout(DEADLINE_S):
            await served.wait_closed()
        assert client.recv(1) == b""


async def test_one_deadline_holds_for_the_wait_for_a_handshake_and_the_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 10 * DEADLINE_S)
    loop, passed_s, has_turn = asyncio.get_running_loop(), 0.0, asyncio.Event()
    time_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: time_s() + passed_s)

    async def long_wait(*_: Any) -> None:
        nonlocal passed_s
        passed_s = server.HANDSHAKE_S
        has_turn.set()

    monkeypatch.setattr(HandshakeTurns, "turn", long_wait)
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        client.setblocking(False)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        served = HttpServer(Mock(), listener, Timeouts(1.0, 1.0, 1.0), 1, tls)
        served.start()
        await has_turn.wait()
        async with asyncio.timeout(DEADLINE_S):
            assert await loop.sock_recv(client, 1) == b""
        served.close()
        await served.wait_closed()
