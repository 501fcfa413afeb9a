"""Connections to the front: who hangs up, what comes behind a request, what is no HTTP."""

import asyncio
import contextlib
import gc
import json
import re
import socket
import struct
import time

import httpx
import pytest

from conductor.front.http.exchange import Exchange
from mooncake.leadership.conductor_dealer import ConductorDealer
from mooncake.messages.requests import Request
from tests.conductor.front.fakes import DEADLINE_S, MODEL_NAME, FakeCluster, Running, raw_request
from tests.conductor.front.routes.asking import HI


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens_before", [0, 1])
def test_hang_up_cancels_the_work(front: Running, stream: bool, num_tokens_before: int) -> None:
    async def stall(cluster: FakeCluster, request: Request) -> None:
        if num_tokens_before:
            await cluster.send_tokens(request, b"a")

    aborted = front.metric("mooncake_requests_total", outcome="aborted")
    front.cluster.behaviour = stall
    body = json.dumps({"model": MODEL_NAME, "messages": HI, "stream": stream, "n": 2}).encode()
    with raw_request(front.address, "/v1/chat/completions", body) as connection:
        front.cluster.wait_until(lambda: len(front.cluster.submitted) == 2)
        if stream and num_tokens_before:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert front.cluster.cancelled == []
    front.cluster.wait_until(lambda: len(front.cluster.cancelled) == 2)
    assert set(front.cluster.cancelled) == {request.request_id for request in front.cluster.submitted}
    assert front.metric("mooncake_requests_total", outcome="aborted") == aborted + 1
    assert front.metric("mooncake_requests_running") == 0


def test_a_request_whose_client_has_gone_is_not_submitted(
    front: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = front.metric("mooncake_requests_total", outcome="aborted")
    body = json.dumps({"model": MODEL_NAME, "messages": HI}).encode()
    with monkeypatch.context() as patch:
        patch.setattr(ConductorDealer, "num_queued", 1000)
        for _ in range(3):
            raw_request(front.address, "/v1/chat/completions", body).close()
        front.cluster.wait_until(
            lambda: front.metric("mooncake_requests_total", outcome="aborted") == aborted + 3
        )
        assert not front.cluster.submitted
    with raw_request(front.address, "/v1/chat/completions", body) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert len(front.cluster.submitted) == 1


def test_a_hang_up_behind_a_second_request_cancels_the_first(front: Running) -> None:
    has_left = asyncio.Event()

    async def in_two_parts(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"a")
        await has_left.wait()
        await cluster.send_tokens(request, b"b", 1)

    aborted = front.metric("mooncake_requests_total", outcome="aborted")
    front.cluster.behaviour = in_two_parts
    body = json.dumps({"model": MODEL_NAME, "messages": HI, "stream": True}).encode()
    with raw_request(front.address, "/v1/chat/completions", body) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        httpx.get(f"{front.url}/health", timeout=DEADLINE_S)  # answered later, so that has been read
        # So that the server's next write fails: with a request waiting it reads no more, and sees no end.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    front.cluster.loop.call_soon_threadsafe(has_left.set)
    front.cluster.wait_until(lambda: len(front.cluster.cancelled) == 1)
    assert front.metric("mooncake_requests_total", outcome="aborted") == aborted + 1


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_requests_behind_each_other_are_answered_in_turn(front: Running, piece_bytes: int) -> None:
    texts = [f"{number} \n\n" * number for number in range(40)]
    requests = []
    for number, text in enumerate(texts):
        body = json.dumps({"prompt": text}, indent=number).replace("\n", "\r\n\r\n").encode()
        length = b"content-length: %d\r\n\r\n%s" % (len(body), body)
        chunks = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        requests += [b"POST /tokenize HTTP/1.1\r\nhost: x\r\n", chunks if number % 2 else length]
        requests += [b"GET /health HTTP/1.1\r\n\r\n"] * (number % 4)
    said = b"".join(requests) + b"GET /version HTTP/1.1\r\nconnection: close\r\n\r\n"
    with socket.create_connection(front.address, DEADLINE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(said), piece_bytes):
            connection.sendall(said[start : start + piece_bytes])
        with connection.makefile("rb") as heard:
            answers = heard.read()
    expected = []
    for number, text in enumerate(texts):
        expected += [b'"count":%d,' % len(text.encode())] + [b'{"status":"ok"}'] * (number % 4)
    assert re.findall(rb'"count":\d+,|{"status":"ok"}|"version"', answers) == [*expected, b'"version"']
    assert answers.count(b"HTTP/1.1 200 ") == len(expected) + 1


def test_what_comes_behind_the_last_request_is_not_read(
    front: Running, caplog: pytest.LogCaptureFixture
) -> None:
    last = b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n"
    with socket.create_connection(front.address, DEADLINE_S) as connection:
        connection.sendall(last * 3)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1000):
                answer += piece
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01 is no HTTP\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    ],
    ids=["no HTTP", "another protocol"],
)
def test_clients_that_speak_something_else_do_not_fill_the_log(
    front: Running, caplog: pytest.LogCaptureFixture, said: bytes, status: int
) -> None:
    with socket.create_connection(front.address, DEADLINE_S) as connection:
        connection.sendall(said)
        assert connection.recv(100).startswith(b"HTTP/1.1 %d" % status)
    assert not caplog.records


def num_exchanges() -> int:
    """Requests of which the server remembers something."""
    return sum(type(kept) is Exchange for kept in gc.get_objects())


def test_what_a_request_needed_is_freed_without_a_search_for_garbage(front: Running) -> None:
    """All streams would wait for that."""
    gc.collect()
    threshold, *others = gc.get_threshold()
    gc.set_threshold(0, *others)  # never; who reads a body disables and enables it
    try:
        num_before = num_exchanges()
        with httpx.Client(base_url=front.url, timeout=DEADLINE_S) as client:
            body = {"model": MODEL_NAME, "prompt": "hi", "stream": True}
            for _ in range(5):
                assert client.post("/v1/completions", json=body).text.endswith("[DONE]\n\n")
            assert num_exchanges() <= num_before + 1, "a connection remembers the latest one"
            for _ in range(5):  # each over a connection of its own
                httpx.post(f"{front.url}/v1/completions", json=body, timeout=DEADLINE_S)
            deadline_s = time.monotonic() + DEADLINE_S
            while num_exchanges() > num_before + 1:
                assert time.monotonic() < deadline_s, "connections that are closed remember the latest one"
                client.get("/health")
    finally:
        gc.set_threshold(threshold, *others)
