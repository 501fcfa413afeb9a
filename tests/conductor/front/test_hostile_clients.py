"""Clients that send too much, too slowly or nothing: others are served meanwhile, and memory stays bounded.

The front is a process of its own, so that its memory can be told from the clients'.
"""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conductor.front.fakes import MODEL_NAME, byte_model, running_front
from tests.deadline import DEADLINE_S

MIB = 1 << 20
MAX_REQUEST_BYTES = 8 * MIB
REQUEST_TIMEOUT_S = 2.0
SERVED_WITHIN_S = 5.0
"""others, of what the front computes meanwhile; what is parsed beside them holds up Python"""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GOOD = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}


class Front:
    """A front's process, and what it takes."""

    def __init__(self, pid: int, url: str) -> None:
        self.url, self._status, self._stat = url, Path(f"/proc/{pid}/status"), Path(f"/proc/{pid}/stat")
        self._client = httpx.Client(base_url=url, timeout=DEADLINE_S)
        self.address = ("127.0.0.1", int(url.rpartition(":")[2]))

    def most_bytes(self) -> int:
        """The most memory that it has had."""
        [line] = [line for line in self._status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def answer_s(self) -> float:
        """Seconds for which the front computes until a good request is answered."""
        started_s = self._computed_s()
        answer = self._client.post("/v1/chat/completions", json=GOOD)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello!"
        return self._computed_s() - started_s

    def _computed_s(self) -> float:
        _, _, fields = self._stat.read_text().rpartition(")")
        return sum(map(int, fields.split()[11:13])) / _TICKS_PER_S

    @contextlib.contextmanager
    def serving_others(self, at_most_bytes: int) -> Iterator[None]:
        """Fails if others are not served in time within, or if it takes `at_most_bytes` more."""
        before = self.most_bytes()
        times: list[float] = []
        stop = threading.Event()

        def ask() -> None:
            times.append(self.answer_s())
            while not stop.wait(0.01):
                times.append(self.answer_s())

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield
        finally:
            stop.set()
            asking.join()
        assert max(times) < SERVED_WITHIN_S
        assert self.most_bytes() - before < at_most_bytes


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    command = [sys.executable, "-m", __name__, str(tmp_path_factory.mktemp("front"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        front = Front(process.pid, process.stdout.readline().strip())
        front.answer_s()
        yield front
        process.stdin.close()


@pytest.fixture(autouse=True)
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("is_said", [True, False], ids=["said", "unsaid"])
def test_a_body_of_100_mb(front: Front, is_said: bool) -> None:
    parts = (b" " * MIB for _ in range(100))
    headers = {"content-length": str(100 * MIB)} if is_said else {}
    with front.serving_others(at_most_bytes=40 * MIB):
        answer = httpx.post(f"{front.url}/v1/completions", content=parts, headers=headers, timeout=DEADLINE_S)
    assert answer.status_code == 413


def nested(opened: str, closed: str) -> bytes:
    return f'{{"model": "{MODEL_NAME}", "messages": {opened * 10_000}1{closed * 10_000}}}'.encode()


def many(message: str) -> bytes:
    """As many messages as a body may have, up to a million."""
    num = min(1_000_000, (MAX_REQUEST_BYTES - 100) // (len(message) + 1))
    return f'{{"model": "{MODEL_NAME}", "messages": [{",".join([message] * num)}]}}'.encode()


def entries() -> bytes:
    return b",".join(b'"k%d":""' % number for number in range(600_000))


@pytest.mark.parametrize(
    "body",
    [
        lambda: nested("[", "]"),
        lambda: nested('{"a":', "}"),
        lambda: many('{"role":"user","content":""}'),
        lambda: many("{}"),
        lambda: many("1"),
        lambda: many("{}").replace(b'"messages"', b'"messages":[{"role":"user"}],"stop_token_ids"'),
        lambda: b'{"logit_bias":{%s}}' % entries(),
        lambda: b'{"response_format":{%s}}' % entries(),
        lambda: many('{"role":"user","content":[{},{},{}]}'),
    ],
    ids=[
        "deep lists",
        "deep objects",
        "messages",
        "no messages",
        "numbers",
        "token ids",
        "biases",
        "fields",
        "parts",
    ],
)
def test_a_body_that_is_a_burden(front: Front, body: Callable[[], bytes]) -> None:
    with front.serving_others(at_most_bytes=300 * MIB):
        answer = httpx.post(f"{front.url}/v1/chat/completions", content=body(), timeout=DEADLINE_S)
    assert answer.status_code == 400
    assert len(answer.content) < 1000


def test_many_bodies_that_never_end(front: Front) -> None:
    """More than are let in together: whoever has been sending for longest makes room."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % MAX_REQUEST_BYTES
    with front.serving_others(at_most_bytes=100 * MIB), contextlib.ExitStack() as clients:
        for _ in range(50):
            client = clients.enter_context(socket.create_connection(front.address, timeout=DEADLINE_S))
            with contextlib.suppress(ConnectionError):
                client.sendall(head + bytes(MAX_REQUEST_BYTES - 1))


def test_clients_that_send_slowly_are_hung_up_on(front: Front) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    beginnings = [b"", b"P", head, head + b"Content-Length: 1000\r\n\r\n{", head + b"X: " + b"x" * 10_000]
    with contextlib.ExitStack() as open_ones, front.serving_others(at_most_bytes=40 * MIB):
        started_s = time.monotonic()
        connections = []
        for _ in range(40):
            for beginning in beginnings:
                connection = open_ones.enter_context(socket.create_connection(front.address, DEADLINE_S))
                connection.sendall(beginning)
                connections.append(connection)
        for connection in connections[1:]:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"x")  # a byte now and then does not help
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                # "Px" is no method; who has sent nothing gets nothing
                assert connection.recv(100)[:13] in (b"", b"HTTP/1.1 400 ", b"HTTP/1.1 408 ")
    assert time.monotonic() - started_s > REQUEST_TIMEOUT_S / 2


def test_a_slow_second_request_is_hung_up_on_too(front: Front) -> None:
    with socket.create_connection(front.address, DEADLINE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(1000)
        connection.sendall(b"GET /health")
        with connection.makefile("rb") as rest:
            head, _, body = rest.read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("headers", [b"X: " + b"x" * 100_000, b"X: x\r\n" * 20_000])
def test_a_head_without_end(front: Front, headers: bytes) -> None:
    with socket.create_connection(front.address, DEADLINE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(ConnectionError):
            connection.sendall(headers)
            assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_many_requests_behind_each_other(front: Front) -> None:
    requests = b"GET / HTTP/1.1\r\n\r\n" * (MIB // 18)
    with contextlib.ExitStack() as open_ones, front.serving_others(at_most_bytes=40 * MIB):
        for _ in range(50):
            connection = open_ones.enter_context(socket.create_connection(front.address, DEADLINE_S))
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.sendall(requests)
        assert front.answer_s() < SERVED_WITHIN_S


def test_2000_idle_connections(front: Front) -> None:
    with contextlib.ExitStack() as open_ones, front.serving_others(at_most_bytes=80 * MIB):
        for _ in range(2000):
            open_ones.enter_context(socket.create_connection(front.address, DEADLINE_S))
        assert front.answer_s() < SERVED_WITHIN_S


if __name__ == "__main__":
    limits = {"max_request_bytes": MAX_REQUEST_BYTES, "request_timeout_s": REQUEST_TIMEOUT_S}
    with running_front(Path(sys.argv[1]), byte_model(), **limits) as running:
        print(running.url, flush=True)
        sys.stdin.read()
