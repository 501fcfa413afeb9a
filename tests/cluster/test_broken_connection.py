"""A worker's connection to the Conductor breaks, and takes with it what was on its way."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mooncake.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import eventually
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
SMALL = ["--kvcache-pool-bytes=16MiB", "--kvcache-device-bytes=16MiB", "--kvcache-block-size=16"]


class Relay:
    """Between a worker and its Conductor. While `swallows`, what the Conductor says is lost."""

    def __init__(self, conductor_port: int) -> None:
        self.swallows = False
        self._conductor_port = conductor_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def break_connections(self) -> None:
        while self._sockets:
            with contextlib.suppress(OSError):
                self._sockets.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.break_connections()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                worker, _ = self._listener.accept()
                conductor = socket.create_connection(("127.0.0.1", self._conductor_port))
                self._sockets += [worker, conductor]
                for pair in ((worker, conductor), (conductor, worker)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        is_from_conductor = source.getpeername()[1] == self._conductor_port
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not (self.swallows and is_from_conductor):
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()


@pytest.mark.parametrize(("behind_the_relay", "state"), [("prefill", "prefilling"), ("decode", "reserving")])
def test_a_request_whose_order_was_lost_is_answered(
    run_dir: Path, tmp_path: Path, behind_the_relay: str, state: str
) -> None:
    (tmp_path / "tiny").mkdir()
    tiny_model("smollm2", tmp_path / "tiny")
    write_tiny_tokenizer(tmp_path / "tiny")
    ClusterKey.generate().save(tmp_path / "cluster.key")
    port = free_port()
    common = [
        f"--model={tmp_path / 'tiny'}",
        *SMALL,
        f"--security-key-file={tmp_path / 'cluster.key'}",
        f"--conductor-reply-endpoint=tcp://127.0.0.1:{free_port()}",
    ]

    def server(role: str, conductor_port: int, until: str) -> ForkedServer:
        endpoint = f"--conductor-endpoint=tcp://127.0.0.1:{conductor_port}"
        return ForkedServer(f"--role={role}", *common, endpoint, run_dir=run_dir, until=until)

    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(relay_to(port))
        conductor = stack.enter_context(server("conductor", port, "^ready in"))
        for role in ("prefill", "decode"):
            stack.enter_context(server(role, relay.port if role == behind_the_relay else port, "^ready in"))
        client = stack.enter_context(httpx.Client(base_url=conductor.url, timeout=30))
        eventually(lambda: client.get("/ready").status_code == 200, "the cluster is ready")
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        pool = stack.enter_context(ThreadPoolExecutor())
        relay.swallows = True
        answer = pool.submit(client.post, "/v1/completions", json=body)
        eventually(lambda: f'state="{state}"}} 1.0' in client.get("/metrics").text, "it has been ordered")
        relay.break_connections()
        relay.swallows = False
        assert answer.result().raise_for_status().json()["usage"]["completion_tokens"] == 3
