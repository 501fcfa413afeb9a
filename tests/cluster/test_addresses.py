"""Addresses of nodes as networks have them: IPv6, names that move, and those that are not the node's own."""

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mooncake.security.keys import ClusterKey
from tests.chaos.host_server import HostServer
from tests.chaos.network import Network, Place, Unavailable, hosts
from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.tiny_cluster import SMALL, TRANSFERS, complete, is_ready, text_of
from tests.deadline import DEADLINE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
PROMPT = list(range(3, 60))


class Nodes:
    """Nodes of one cluster, each on a host of its own network or of another.

    Conductors end last: an instance without one waits for it before it ends.
    """

    def __init__(self, stack: contextlib.ExitStack, model: Path, folder: Path) -> None:
        self._conductors = stack.enter_context(contextlib.ExitStack())
        self._others = stack.enter_context(contextlib.ExitStack())
        key = folder / "key"
        ClusterKey.generate().save(key)
        self._shared = [f"--model={model}", f"--security-key-file={key}", *SMALL, TRANSFERS]
        self._shared += ["--messenger-transport=tcp", "--conductor-peer-timeout-s=20"]

    def start(self, place: Place, role: str, *flags: str, hosts_file: Path | None = None) -> HostServer:
        ends_with = self._conductors if role == "conductor" else self._others
        run_dir = Path(ends_with.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
        arguments = [f"--role={role}", *self._shared, *flags]
        node = HostServer(place, *arguments, run_dir=run_dir, port=8000, hosts_file=hosts_file)
        ends_with.callback(partial(HostServer.__exit__, node))
        node.start()
        return node


@contextlib.contextmanager
def network(names: tuple[str, ...], prefix: str = "10.88.0.") -> Iterator[Network]:
    """Hosts, and this thread beside them. Skips the test where there can be none."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(names, prefix))
        except Unavailable as reason:
            pytest.skip(str(reason))
        stack.enter_context(made.hub.entered())
        yield made


def conductor_flags(address: str, any_address: str) -> list[str]:
    """Where a conductor listens, and what others are told."""
    return [
        f"--conductor-endpoint=tcp://{address}:7800",
        f"--conductor-listen-endpoint=tcp://{any_address}:7800",
        f"--conductor-reply-endpoint=tcp://{address}:*",
        f"--conductor-reply-listen-endpoint=tcp://{any_address}:*",
        f"--http-host={any_address.strip('[]')}",
    ]


def answers(server: Server) -> str:
    """What a new prompt gets, once there is a pair."""
    eventually(lambda: is_ready(server), "there is a pair")
    return text_of(complete(server, prompt=PROMPT, num_tokens=20))


def test_a_cluster_has_ipv6_addresses_alone(tiny: Path, tmp_path: Path) -> None:
    with network(("a", "b"), "fd00:88::") as made, contextlib.ExitStack() as stack:
        nodes, (one, other) = Nodes(stack, tiny, tmp_path), made.hosts.values()
        conductor = nodes.start(one, "conductor", *conductor_flags(one.bracketed, "[::]"))
        find = f"--conductor-endpoint=tcp://{one.bracketed}:7800"
        any_host = ("--messenger-listen-hosts=::", f"--messenger-hosts={one.address}")
        nodes.start(one, "prefill", find, *any_host, f"--worker-metrics-listen={one.bracketed}:9100")
        nodes.start(other, "decode", find, f"--messenger-hosts={other.address}")
        front = nodes.start(
            other, "front", find, f"--conductor-reply-endpoint=tcp://{other.bracketed}:7811", "--http-host=::"
        )
        assert answers(front) == answers(conductor)
        assert HTTP.get(f"http://{one.bracketed}:9100/ready", timeout=DEADLINE_S).status_code == 200


def test_a_node_is_reached_at_an_address_that_it_does_not_have(tiny: Path, tmp_path: Path) -> None:
    """The decode instance and a front are in a pod, whose address nobody else can reach."""
    with network(("a", "router")) as made, made.pod_behind("router") as pod, contextlib.ExitStack() as stack:
        nodes, one, told = Nodes(stack, tiny, tmp_path), made.hosts["a"], made.hosts["router"]
        conductor = nodes.start(one, "conductor", *conductor_flags(one.bracketed, "0.0.0.0"))
        find = f"--conductor-endpoint=tcp://{one.bracketed}:7800"
        nodes.start(one, "prefill", find, f"--messenger-hosts={one.address}")
        at_told = (f"--messenger-hosts={told.address}", "--messenger-listen-hosts=0.0.0.0")
        nodes.start(pod, "decode", find, *at_told)
        own = (
            f"--conductor-reply-endpoint=tcp://{told.address}:*",
            "--conductor-reply-listen-endpoint=tcp://0.0.0.0:*",
        )
        front = nodes.start(pod, "front", find, *own, "--http-host=0.0.0.0")
        front.place = told
        assert answers(front) == answers(conductor)


@pytest.mark.parametrize(
    "vanishes", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["ended", "vanished"]
)
def test_a_conductor_comes_back_at_another_address(tiny: Path, tmp_path: Path, vanishes: bool) -> None:
    """It has a name. Its first host has ended its connections, or is silent from one moment to the next."""
    with network(("a", "b", "c")) as made, contextlib.ExitStack() as stack:
        first, other, second = made.hosts.values()
        names = tmp_path / "hosts"
        names.write_text(f"{first.address} leader.test\n")
        nodes = Nodes(stack, tiny, tmp_path)
        flags = [*conductor_flags("leader.test", "0.0.0.0"), "--conductor-peer-timeout-s=5"]
        conductor = nodes.start(first, "conductor", *flags, hosts_file=names)
        find = "--conductor-endpoint=tcp://leader.test:7800"
        for role in ("prefill", "decode"):
            nodes.start(other, role, find, f"--messenger-hosts={other.address}", hosts_file=names)
        own = f"--conductor-reply-endpoint=tcp://{other.address}:7811"
        front = nodes.start(other, "front", find, own, f"--http-host={other.address}", hosts_file=names)
        before = answers(front)
        if vanishes:
            stack.enter_context(made.mute("a"))
            stack.enter_context(made.deaf("a"))
        else:
            conductor.stop()
        names.write_text(f"{second.address} leader.test\n")
        successor = nodes.start(second, "conductor", *flags, hosts_file=names)
        assert answers(successor) == before
        assert answers(front) == before
