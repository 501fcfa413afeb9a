"""Two Conductors, of which etcd makes one the leader: what the other one takes over, and when."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import Server, eventually
from tests.cluster.streams import MOST_TOKENS, PROMPTS, Streams
from tests.cluster.tiny_cluster import (
    ONE_THREAD,
    TRANSFERS,
    complete,
    is_ready,
    metric,
    wait_until_idle,
)
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
POOLS = ("--kvcache-block-size=8", "--kvcache-pool-bytes=128MiB", "--kvcache-device-bytes=128MiB", ONE_THREAD)
NUM_PAGES = (128 << 20) // (8 * 4 * 1 * 2 * 16 * 4)
LEASE_S = 10
INSTANCES = {"p0": "prefill", "d0": "decode", "d1": "decode"}


@dataclass(frozen=True, slots=True)
class Nodes:
    """Two Conductors' nodes, that of a front, and those of instances."""

    etcd: EtcdServer
    conductors: tuple[Server, Server]
    front: Server

    def leader(self) -> Server:
        """Wait until one of the Conductors has all instances."""
        found: list[Server] = []

        def leads() -> bool:
            found[:] = [server for server in self.conductors if is_ready(server)]
            return bool(found)

        eventually(leads, "a conductor leads, and has a pair")
        [leader] = found
        return leader

    def wait_for_another(self, former: Server) -> Server:
        """Wait until another Conductor has all streams, and return it."""
        [other] = [server for server in self.conductors if server is not former]
        eventually(lambda: is_ready(other), "the standby leads, and has a pair")
        return other

    def wait_until_idle(self) -> None:
        wait_until_idle(self.leader(), num_pages=NUM_PAGES, instances=tuple(INSTANCES))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("model")
    model = folder / "tiny"
    tiny_model("smollm2", model, max_position_embeddings=2 * MOST_TOKENS)
    write_tiny_tokenizer(model)
    ClusterKey.generate().save(folder / "key")
    with EtcdServer(folder) as etcd, contextlib.ExitStack() as stack:
        shared = [f"--model={model}", *POOLS, TRANSFERS, f"--security-key-file={folder / 'key'}"]
        shared += [f"--cluster-etcd-endpoints={etcd.url}", "--conductor-reply-endpoint=tcp://127.0.0.1:*"]
        # A busy machine is not silent for so long, and workers have started again by then.
        shared += ["--conductor-peer-timeout-s=20", f"--conductor-placement-timeout-s={DEADLINE_S}"]
        # It is stopped, not hung; what is stopped is silent for longer than a busy machine.
        shared += ["--hang-timeout-s=never", f"--cluster-etcd-lease-s={LEASE_S}"]

        def node(role: str, *flags: str) -> Server:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
            return stack.enter_context(ForkedServer(f"--role={role}", *shared, *flags, run_dir=run_dir))

        def conductor() -> Server:
            return node("conductor", f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}")

        conductors = conductor(), conductor()
        for name, role in INSTANCES.items():
            node(role, f"--instance={name}")
        front = node("front")
        eventually(lambda: is_ready(front), "there is a pair")
        yield Nodes(etcd, conductors, front)


def has_all_streams(conductor: Server) -> bool:
    return metric(conductor, "mooncake_requests_by_state", state="decoding") == len(PROMPTS)


def health(conductor: Server) -> dict[str, str]:
    """What it says of itself; nothing while it starts."""
    try:
        answer: dict[str, str] = httpx.get(f"{conductor.url}/health", timeout=DEADLINE_S).json()
    except httpx.TransportError:
        return {}
    return answer


def stands_by_for(conductor: Server, leader: Server) -> bool:
    return health(conductor) == {"status": "standby", "leader": leader.url}


def test_a_standby_leads_when_the_leader_is_killed(nodes: Nodes) -> None:
    with Streams(nodes.front) as streams:
        for _ in range(2):
            former = nodes.leader()
            os.kill(former.pid_of("conductor"), signal.SIGKILL)
            leader = nodes.wait_for_another(former)
            eventually(partial(has_all_streams, leader), "it has all streams")
            complete(nodes.front, prompt=[1, 2, 3], num_tokens=3)
            streams.wait_for_more()
            eventually(partial(stands_by_for, former, leader), "the former leader stands by")
        streams.check()
    nodes.wait_until_idle()


def test_a_leader_that_was_stopped_is_heard_by_nobody_and_stands_by(nodes: Nodes) -> None:
    former = nodes.leader()
    pid = former.pid_of("conductor")
    with Streams(nodes.front) as streams:
        os.kill(pid, signal.SIGSTOP)
        try:
            leader = nodes.wait_for_another(former)
            eventually(lambda: has_all_streams(leader), "it has all streams")
            streams.wait_for_more()
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: stands_by_for(former, leader), "the former leader stands by")
        assert former.pid_of("conductor") != pid
        complete(nodes.front, prompt=[1, 2, 3], num_tokens=3)
        assert has_all_streams(leader)
        streams.check()
    nodes.wait_until_idle()


def test_nothing_changes_while_etcd_is_gone(nodes: Nodes) -> None:
    leader = nodes.leader()
    [standby] = [server for server in nodes.conductors if server is not leader]
    pid = leader.pid_of("conductor")

    def reaches_etcd(server: Server) -> bool:
        return bool(metric(server, "mooncake_etcd_reachable"))

    servers = (leader, standby, nodes.front)
    with Streams(nodes.front) as streams:
        nodes.etcd.kill()
        for server in servers:
            eventually(lambda: not reaches_etcd(server), "it misses etcd")  # noqa: B023
        streams.wait_for_more()
        complete(nodes.front, prompt=[1, 2, 3], num_tokens=3)
        nodes.etcd.start()
        for server in servers:
            eventually(partial(reaches_etcd, server), "it has etcd again")
        assert leader.pid_of("conductor") == pid
        assert stands_by_for(standby, leader)
        streams.check()
    for server in servers:
        assert server.num_lines("etcd does not answer: no conductor takes over")
    nodes.wait_until_idle()


def test_a_standby_says_who_leads(nodes: Nodes) -> None:
    leader = nodes.leader()
    [standby] = [server for server in nodes.conductors if server is not leader]
    eventually(lambda: stands_by_for(standby, leader), "it stands by")
    assert metric(leader, "mooncake_conductor_leads") == 1
    assert metric(standby, "mooncake_conductor_leads") == 0
    page = httpx.get(f"{standby.url}/dashboard", timeout=DEADLINE_S)
    assert page.headers["location"] == f"{leader.url}/dashboard"
    refused = httpx.get(f"{standby.url}/admin/instances", timeout=DEADLINE_S)
    assert refused.status_code == 503
    assert leader.url in refused.json()["error"]["message"]
