"""Two Conductors, of which etcd makes one the leader: what the other one takes over, and when."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import httpx
import pytest

from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.separate_nodes import SeparateNodes, wait_until_instances_idle
from tests.cluster.streams import PROMPTS, Streams
from tests.cluster.tiny_cluster import cached_tokens, complete, is_ready, metric, post
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
LEASE_S = 10


@dataclass(frozen=True, slots=True)
class Nodes:
    """Two Conductors' nodes, that of a front, and those of instances."""

    cluster: SeparateNodes
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
        wait_until_instances_idle(self.leader())


def at_some_port() -> str:
    """The flag of a Conductor."""
    return f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("model")
    with EtcdServer(folder) as etcd, contextlib.ExitStack() as stack:
        in_etcd = (f"--cluster-etcd-endpoints={etcd.url}", f"--cluster-etcd-lease-s={LEASE_S}")
        # What is stopped is not hung, though silent for longer than a busy machine.
        cluster = SeparateNodes(stack, folder, *in_etcd, "--hang-timeout-s=never")

        conductors = cluster.start("conductor", at_some_port()), cluster.start("conductor", at_some_port())
        cluster.start_instances()
        front = cluster.start("front")
        eventually(lambda: is_ready(front), "there is a pair")
        yield Nodes(cluster, etcd, conductors, front)


def has_all_streams(conductor: Server) -> bool:
    return metric(conductor, "mooncake_requests_by_state", state="decoding") == len(PROMPTS)


def health(conductor: Server) -> dict[str, str]:
    """What it says of itself; nothing while it starts."""
    try:
        answer: dict[str, str] = HTTP.get(f"{conductor.url}/health", timeout=DEADLINE_S).json()
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
        eventually(lambda: has_all_streams(leader), "it has all streams, and has heard of the answer's end")
        streams.check()
    nodes.wait_until_idle()


def test_a_conductor_that_could_not_take_over_ends(nodes: Nodes) -> None:
    leader = nodes.leader()
    other = nodes.cluster.start("conductor", at_some_port(), "--dtype=bfloat16", until="^error: ")
    assert other.process.wait(DEADLINE_S) == 1
    assert other.num_lines("^error: .*the conductor that leads, .*serves another model")
    assert health(leader)["status"] != "standby"


def test_context_caches_are_there_under_the_next_leader(nodes: Nodes) -> None:
    def names_at(conductor: Server) -> list[str]:
        answer = HTTP.get(f"{conductor.url}/v1/context_caches", timeout=DEADLINE_S).raise_for_status()
        return [cache["name"] for cache in answer.json()["data"]]

    prefix = list(range(3, 3 + 40))
    former = nodes.leader()
    for name in ("book", "gone"):
        made = {"name": name, "prompt": prefix, "ttl": 600}
        assert post(former, made, path="/v1/context_caches").status_code == 200
    HTTP.delete(f"{former.url}/v1/context_caches/gone", timeout=DEADLINE_S).raise_for_status()
    os.kill(former.pid_of("conductor"), signal.SIGKILL)
    leader = nodes.wait_for_another(former)
    assert names_at(leader) == ["book"]
    used = complete(leader, prompt=[5, 6], num_tokens=2, context_cache="book")
    assert cached_tokens(used) == len(prefix)
    HTTP.delete(f"{leader.url}/v1/context_caches/book", timeout=DEADLINE_S).raise_for_status()
    eventually(lambda: stands_by_for(former, leader), "the former leader stands by")
    os.kill(leader.pid_of("conductor"), signal.SIGKILL)
    assert names_at(nodes.wait_for_another(leader)) == []


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
    page = HTTP.get(f"{standby.url}/dashboard", timeout=DEADLINE_S)
    assert page.headers["location"] == f"{leader.url}/dashboard"
    refused = HTTP.get(f"{standby.url}/admin/instances", timeout=DEADLINE_S)
    assert refused.status_code == 503
    assert leader.url in refused.json()["error"]["message"]
