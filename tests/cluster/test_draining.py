"""The end of a whole cluster in one command while answers are open."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake.node.supervisor import TOGETHER_S
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import HTTP, eventually
from tests.cluster.tiny_cluster import SMALL, body, complete, post, samples, streaming, text_in, text_of
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
LONG = {"prompt": [5, 6, 7], "num_tokens": 8000}
"""A request whose answer has not ended when its worker is stopped after the first token."""
WAITS = "waiting for 1 open answer, at most 180 s; press Ctrl-C again to end now"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context that is long enough for `LONG`."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("smollm2", folder, max_position_embeddings=10_000)
    write_tiny_tokenizer(folder)
    return folder


def cluster(model: Path, run_dir: Path, drain_s: float = DEADLINE_S) -> ForkedServer:
    memory = ("--kvcache-pool-bytes=64MiB", "--kvcache-device-bytes=64MiB")
    drain = (f"--worker-drain-timeout-s={drain_s:g}", "--conductor-peer-timeout-s=180")
    return ForkedServer(f"--model={model}", *SMALL, *memory, *drain, run_dir=run_dir)


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextlib.contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """The process `pid` computes nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def client_without_answer(server: ForkedServer) -> socket.socket:
    """A client that has sent a request, and reads nothing of its answer."""
    content = json.dumps({**body(**LONG), "stream": True}).encode()  # type: ignore[arg-type]
    client = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


def test_open_answers_are_finished_and_new_requests_refused(model: Path, run_dir: Path) -> None:
    """A stream, two choices that wait, and a client that goes; and the worker dies and comes back."""
    runs, waits = {"prompt": [5, 6, 7], "num_tokens": 400}, {"prompt": [8, 9, 10], "num_tokens": 50}
    with cluster(model, run_dir) as server, ThreadPoolExecutor(1) as threads:
        expected = [text_of(complete(server, **fields)) for fields in (runs, waits)]
        pids = server.children()
        with streaming(server, **runs) as events:
            text = text_in(next(events))
            os.kill(pids["both-0"], signal.SIGSTOP)  # so that no answer ends before the signal
            whole = threads.submit(post, server, body(**waits, n=2))  # type: ignore[arg-type]
            with client_without_answer(server):
                eventually(
                    lambda: sum(samples(server, "mooncake_requests_by_state")[0].values()) == 4,
                    "all choices are accepted",
                )
                server.process.send_signal(signal.SIGTERM)
                server.wait_for_line("waiting for 3 open answers, at most 180 s; press Ctrl-C again")
            assert HTTP.get(f"{server.url}/ready").status_code == 503
            refused = post(server, body())
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            assert "shutting down and takes no new requests" in refused.text
            os.kill(pids["both-0"], signal.SIGKILL)
            text += "".join(map(text_in, events))
        assert text == expected[0]
        assert [choice["text"] for choice in whole.result().json()["choices"]] == 2 * expected[1:]
        assert server.process.wait(DEADLINE_S) == 0
        server.wait_for_line(r"both-0\] died \(signal 9\)")
        assert not [pid for pid in pids.values() if is_running(pid)]


def interrupted(server: ForkedServer) -> None:
    server.wait_for_line(WAITS)
    began_s = time.monotonic()
    eventually(lambda: time.monotonic() - began_s > TOGETHER_S, "another signal is a second one")
    server.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("drain_s", "then"), [(DEADLINE_S, interrupted), (0.2, lambda _: None)], ids=["second signal", "time"]
)
def test_a_second_signal_or_the_end_of_its_time_ends_open_answers_with_an_error(
    model: Path, run_dir: Path, drain_s: float, then: Callable[[ForkedServer], None]
) -> None:
    with cluster(model, run_dir, drain_s) as server, streaming(server, **LONG) as events:
        next(events)
        with standing_still(server.children()["both-0"]):
            server.process.send_signal(signal.SIGINT)
            then(server)
            *_, last = events
        assert json.loads(last)["error"]["message"] == "the server is shutting down"
        assert server.process.wait(DEADLINE_S) == 0


def test_a_supervisor_that_is_killed_ends_the_drain(model: Path, run_dir: Path) -> None:
    with cluster(model, run_dir) as server, streaming(server, **LONG) as events:
        next(events)
        pids = server.children()
        with standing_still(pids["both-0"]):
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_line(WAITS)
            server.process.kill()
            *_, last = events
        assert json.loads(last)["error"]["message"] == "the server is shutting down"
        eventually(lambda: not any(map(is_running, pids.values())), "all processes end")
