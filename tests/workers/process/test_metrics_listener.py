"""An instance's own /metrics, over HTTP."""

import contextlib
import socket
import struct

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mooncake.errors import ConfigError
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.instance_metrics import InstanceReport
from mooncake.messages.workers import Role
from tests.deadline import DEADLINE_S
from tests.mooncake.messages.test_instance_metrics import STATS, of, parsed
from workers.process import metrics_listener
from workers.process.metrics_listener import ListenerState, listening

REPORT = InstanceReport("p0", 100, Heartbeat(1, 2, 30, {"p0": STATS}))


def test_the_latest_heartbeat_and_the_process_are_told() -> None:
    status = ListenerState(Role.DECODE)
    with listening("127.0.0.1:0", "model", status) as port:
        url = f"http://127.0.0.1:{port}"
        assert "mooncake_instance_requests{" not in httpx.get(f"{url}/metrics", timeout=DEADLINE_S).text
        status.report = REPORT
        samples = parsed(httpx.get(f"{url}/metrics", timeout=DEADLINE_S).text)
        assert of(samples, "mooncake_instance_requests", instance="p0", state="waiting") == 2
        assert of(samples, "vllm:kv_cache_usage_perc", model_name="model", engine="p0") == 0.7
        assert of(samples, "process_resident_memory_bytes") > 0


def test_a_text_is_made_once_for_many_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_listener, "_KEPT_S", 10 * DEADLINE_S)
    num_made = 0

    def counted(registry: CollectorRegistry) -> bytes:
        nonlocal num_made
        num_made += 1
        return generate_latest(registry)

    monkeypatch.setattr(metrics_listener, "generate_latest", counted)
    status = ListenerState(Role.DECODE)
    with listening("127.0.0.1:0", "model", status) as port:
        for status.report in (REPORT, REPORT._replace(num_device_pages=200)):
            for _ in range(3):
                httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S).raise_for_status()
    assert num_made == 2


def test_ready_is_what_the_conductor_says() -> None:
    status = ListenerState(Role.DECODE)
    with listening("127.0.0.1:0", "model", status) as port:
        url = f"http://127.0.0.1:{port}/ready"
        assert httpx.get(url, timeout=DEADLINE_S).status_code == 503
        status.is_registered = True
        assert httpx.get(url, timeout=DEADLINE_S).status_code == 200


def test_a_port_in_use_is_an_error_that_names_the_key() -> None:
    status = ListenerState(Role.DECODE)
    with listening("127.0.0.1:0", "model", status) as port:
        address = f"127.0.0.1:{port}"
        with (
            pytest.raises(ConfigError, match=f"worker.metrics_listen: {address} is in use"),
            listening(address, "model", status),
        ):
            pass
        assert httpx.get(f"http://{address}/nowhere", timeout=DEADLINE_S).status_code == 404


def test_one_connection_too_many_ends_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_listener, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(metrics_listener._Handler, "timeout", 3600.0)
    with (
        listening("127.0.0.1:0", "model", ListenerState(Role.DECODE)) as port,
        contextlib.ExitStack() as stack,
    ):
        address = ("127.0.0.1", port)
        oldest, *_ = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        assert httpx.get(f"http://127.0.0.1:{port}/nowhere", timeout=DEADLINE_S).status_code == 404
        oldest.settimeout(DEADLINE_S)
        assert oldest.recv(1000) == b""


def test_clients_that_hang_up_do_not_fill_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    reset = struct.pack("ii", 1, 0)
    with listening("127.0.0.1:0", "model", ListenerState(Role.DECODE)) as port:
        for said in (b"", b"GET /metrics HTTP/1.1\r\n", b"\xff" * 100):
            with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
                client.sendall(said)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        assert httpx.get(f"http://127.0.0.1:{port}/nowhere", timeout=DEADLINE_S).status_code == 404
    assert capfd.readouterr().err == ""
