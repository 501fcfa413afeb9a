"""Crowds without the key at every port of a cluster: memory stays bounded, and clients are served."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mooncake.security.handshakes import MOST_UNAUTHENTICATED
from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.tiny_cluster import SMALL
from tests.crowds import (
    MIB,
    Opening,
    crowd,
    http_body,
    http_head,
    listening_ports,
    most_resident_bytes,
    resident_bytes,
    zmtp_frame,
)
from tests.deadline import DEADLINE_S
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NUM_EACH = 1000
HTTP_PORT_BYTES = (32 * MIB) + NUM_EACH * (12 << 10)
"""of requests that have not arrived whole, and of connections that wait"""
ZMQ_PORT_BYTES = MOST_UNAUTHENTICATED * (55 << 10)
MOST_MORE_BYTES = 2 * 2 * (HTTP_PORT_BYTES + ZMQ_PORT_BYTES)
"""The limits of the Conductor's process, which has two ports of each kind: on a busy machine all crowds
stay at once. As much again for what has been given up and is not yet free. One port has bodies of 890 MB."""
MOST_KEPT_BYTES = 50 * MIB
OPENINGS: list[Opening] = [
    *map(zmtp_frame, (15 * MIB, MIB, 64 << 10, 32 << 10, 1 << 10)),
    http_body(8 * MIB),
    http_head(60_000),
    (b"", MIB),
    (b"", 0),
]


@dataclass(frozen=True)
class Cluster:
    """Its conductor's HTTP address, and the TCP ports of its processes."""

    url: str
    ports: dict[int, list[int]]

    def answers(self) -> None:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        answer = HTTP.post(f"{self.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text


@pytest.fixture
def cluster(tiny: Path, tmp_path: Path, run_dir: Path) -> Iterator[Cluster]:
    """A process each for Conductor, prefill and decode; what can listen for TCP does."""
    key = tmp_path / "cluster.key"
    ClusterKey.generate().save(key)

    def address() -> str:
        return f"127.0.0.1:{free_port()}"

    common = [
        *(f"--model={tiny}", *SMALL, f"--security-key-file={key}"),
        *("--messenger-transport=tcp", f"--conductor-endpoint=tcp://{address()}"),
    ]

    def instance(role: str) -> Server:
        return ForkedServer(
            *(f"--role={role}", *common),
            *(f"--kvcache-listen={address()}", f"--worker-metrics-listen={address()}"),
            *(f"--kvcache-vllm-events=tcp://{address()}", f"--kvcache-vllm-replay=tcp://{address()}"),
            run_dir=run_dir,
            until=f"ready {role}",
        )

    with contextlib.ExitStack() as stack:
        conductor = stack.enter_context(
            ForkedServer(
                *("--role=conductor", *common, f"--conductor-reply-endpoint=tcp://{address()}"),
                f"--http-admin-listen={address()}",
                run_dir=run_dir,
            )
        )
        servers = [conductor, *(stack.enter_context(instance(role)) for role in ("prefill", "decode"))]
        pids = [pid for server in servers for pid in server.children().values()]
        cluster = Cluster(conductor.url, {pid: listening_ports(pid) for pid in pids})
        eventually(
            lambda: HTTP.get(f"{cluster.url}/ready", timeout=DEADLINE_S).status_code == 200,
            "the cluster is ready",
        )
        cluster.answers()
        yield cluster


def test_crowds_at_every_port_take_little_memory_and_give_it_back(cluster: Cluster) -> None:
    most, now = ({pid: of(pid) for pid in cluster.ports} for of in (most_resident_bytes, resident_bytes))

    def more_bytes(of: Callable[[int], int], before: dict[int, int]) -> int:
        return max(of(pid) - before[pid] for pid in cluster.ports)

    ports = sorted({port for ports in cluster.ports.values() for port in ports})
    assert len(ports) >= 14, "4 of the conductor and its front, 6 of each instance and its messenger"
    with crowd(ports, OPENINGS, NUM_EACH):
        cluster.answers()
    assert more_bytes(most_resident_bytes, most) < MOST_MORE_BYTES
    eventually(lambda: more_bytes(resident_bytes, now) < MOST_KEPT_BYTES, "memory has gone back", DEADLINE_S)
    cluster.answers()
