"""Instances that change their role and leave while streams run: no stream breaks, and no token changes."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mooncake.cli.commands import run as command
from mooncake.security.api_keys import add_api_key
from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.slowed import SlowedServer
from tests.cluster.tiny_cluster import (
    SMALL,
    TRANSFERS,
    complete,
    metric,
    streaming,
    text_in,
    text_of,
    tiny_server,
    wait_until_idle,
)
from tests.deadline import DEADLINE_S
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NUM_STREAMS, NUM_TOKENS = 6, 60
PROMPTS = [[3 + index, *range(3, 60)] for index in range(NUM_STREAMS)]


@pytest.fixture
def server(tiny: Path, run_dir: Path) -> Iterator[Server]:
    flags = (TRANSFERS, "--conductor-rebalancing=false", "--num-prefill=2", "--num-decode=2")
    with tiny_server(tiny, run_dir, *flags, kind=SlowedServer) as running:
        yield running


class Streams:
    """Streams of all prompts, one after another for each prompt, as long as the block runs."""

    _expected: ClassVar[list[str]] = []
    """The answers where nothing happens: those of one model, whatever serves it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        if not self._expected:
            with ThreadPoolExecutor(NUM_STREAMS) as threads:
                self._expected.extend(threads.map(self._answer, PROMPTS))
        self._is_over, self._num_begun = threading.Event(), threading.Semaphore(0)

    def _answer(self, prompt: list[int]) -> str:
        return text_of(complete(self._server, prompt=prompt, num_tokens=NUM_TOKENS))

    def __enter__(self) -> "Streams":
        self._threads = ThreadPoolExecutor(NUM_STREAMS)
        self._clients: list[Future[None]] = [
            self._threads.submit(self._keep_asking, index) for index in range(NUM_STREAMS)
        ]
        return self

    def wait_until_all_run(self) -> None:
        """Wait until each client has got the first text of another stream."""
        while self._num_begun.acquire(blocking=False):
            pass
        for _ in range(2 * NUM_STREAMS):
            assert self._num_begun.acquire(timeout=DEADLINE_S)

    def _keep_asking(self, index: int) -> None:
        while not self._is_over.is_set():
            text = ""
            with streaming(self._server, prompt=PROMPTS[index], num_tokens=NUM_TOKENS) as events:
                for event in events:
                    if not text:
                        self._num_begun.release()
                    text += text_in(event)
            assert text == self._expected[index]

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._threads.shutdown()
        for client in self._clients:
            client.result()


def instances(server: Server) -> dict[str, dict[str, Any]]:
    answer = HTTP.get(f"{server.url}/admin/instances", timeout=DEADLINE_S).raise_for_status()
    return {one["name"]: one for one in answer.json()["instances"]}


def num_failed(server: Server) -> float:
    return metric(server, "mooncake_ended_requests_total", outcome="failed")


def test_roles_change_while_streams_run(server: Server) -> None:
    with Streams(server) as streams:
        for name, role in (("decode-0", "prefill"), ("prefill-1", "decode"), ("decode-0", "both")):
            streams.wait_until_all_run()
            assert command(["role", name, role, "--url", server.url]) == 0
            shown = instances(server)[name]
            assert (shown["role"], shown["state"]) == (role, "serving")
        streams.wait_until_all_run()
    assert num_failed(server) == 0
    eventually(lambda: metric(server, "mooncake_instances", role="both") == 1, "its role is shown")
    wait_until_idle(server, instances=("prefill-0", "prefill-1", "decode-0", "decode-1"))


def test_an_instance_keeps_its_role_when_its_worker_restarts(server: Server) -> None:
    assert command(["role", "decode-0", "prefill", "--url", server.url]) == 0
    server.wait_for_line(r"\[decode-0\] ready")
    num_lives = server.num_lines(r"\[decode-0\] ready")
    os.kill(server.pid_of("decode-0"), signal.SIGKILL)
    server.wait_for_line(r"\[decode-0\] ready", num_lives + 1)
    eventually(
        lambda: instances(server).get("decode-0", {}).get("role") == "prefill", "it has its role again"
    )


def test_instances_are_drained_while_streams_run(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Streams(server) as streams:
        for name in ("decode-1", "prefill-0"):
            streams.wait_until_all_run()
            assert command(["drain", name, "--url", server.url]) == 0
            assert name not in instances(server)
        streams.wait_until_all_run()
        for name in ("decode-0", "prefill-1"):
            assert command(["drain", name, "--url", server.url]) == 1
            assert "is the last instance for" in capsys.readouterr().err
        assert command(["drain", "decode-1", "--url", server.url]) == 1
        assert "there are decode-0, prefill-1" in capsys.readouterr().err
    assert num_failed(server) == 0
    eventually(
        lambda: not any("decode-1" in name or "prefill-0" in name for name in server.children()),
        "their processes have ended",
    )
    wait_until_idle(server, instances=("prefill-1", "decode-0"))


def test_a_node_ends_when_its_instance_has_been_drained(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    """One is drained by order, with an admin's key, and one by SIGTERM, both under load."""
    ClusterKey.generate().save(tmp_path / "cluster.key")
    key = tmp_path / "me.key"
    key.write_text(add_api_key(tmp_path / "admins.yaml", "me", {}))
    common = [
        f"--model={tiny}",
        *SMALL,
        TRANSFERS,
        "--conductor-rebalancing=false",
        f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}",
        f"--conductor-reply-endpoint=tcp://127.0.0.1:{free_port()}",
        f"--security-key-file={tmp_path / 'cluster.key'}",
    ]

    def node(name: str, until: str = r"\] ready \w+ on") -> SlowedServer:
        role = name.partition("-")[0]
        return SlowedServer(f"--role={role}", f"--instance={name}", *common, run_dir=run_dir, until=until)

    admin = f"--http-admin-keys-file={tmp_path / 'admins.yaml'}"
    with (
        ForkedServer("--role=conductor", admin, *common, run_dir=run_dir) as server,
        node("prefill-0"),
        node("decode-0"),
        node("decode-1") as one,
        node("decode-2") as other,
    ):
        with Streams(server) as streams:
            streams.wait_until_all_run()
            assert command(["drain", "decode-1", "--url", server.url]) == 1
            assert command(["drain", "decode-1", "--url", server.url, "--key-file", str(key)]) == 0
            assert one.process.wait(DEADLINE_S) == 0
            streams.wait_until_all_run()
            other.process.send_signal(signal.SIGTERM)
            assert other.process.wait(DEADLINE_S) == 0
            streams.wait_until_all_run()
        assert num_failed(server) == 0
