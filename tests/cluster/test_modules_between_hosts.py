"""Modules at a helper on another host while processes and the link between both hosts fail.

After each fault every answer was right, the modules are where the Conductor says, and all pages are free.
"""

import contextlib
import dataclasses
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from mooncake.security.keys import ClusterKey
from tests.chaos.host_server import HostServer
from tests.chaos.network import Network, Place, Unavailable, hosts
from tests.cluster.harness import Server, eventually
from tests.cluster.moving import Asked, Clients, come_back, modules_place, move, order_back
from tests.cluster.test_moved_modules import LONG, NUM_LONG, PAGE_BYTES
from tests.cluster.tiny_cluster import SMALL, body, complete, samples, text_of, tiny_server
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
NUM_PAGES = {"prefill-0": 256, "decode-0": 40, "decode-1": 56}
"""Device pages of each instance. A long request needs 60, which only both decode instances together have."""
PARTS = ("--heads=1", "--layers=1:3", "--sequences=0.4")
PROMPTS = [list(range(3 + index, 30 + 3 * index)) for index in range(3)]
NUM_TOKENS = 150
OWNER_HOST, HELPER_HOST = "a", "b"
_MOMENT_S = 1.0
_SLOW_RATE, _LONGEST_WAIT = "10mbit", "400ms"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Conductor and a prefill instance beside two hosts with a decode instance each."""

    network: Network
    nodes: dict[str, HostServer]
    expected: list[str]
    expected_long: str

    @property
    def conductor(self) -> Server:
        return self.nodes["conductor"]

    def clients(self) -> Clients:
        """Return clients of this cluster.

        A long request may be refused, or fail as an instance is lost, while it fits nowhere.
        """
        known = zip(PROMPTS, self.expected, strict=True)
        asked = [Asked(body(prompt, NUM_TOKENS), text) for prompt, text in known]
        long = Asked(body(LONG, num_tokens=NUM_LONG), self.expected_long, may_be_refused=True)
        return Clients(self.conductor, [*asked, long])

    def signal(self, name: str, signum: signal.Signals) -> None:
        os.kill(self.nodes[name].pid_of(name), signum)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Make a context in which no packet passes between the two hosts."""
        with (
            self.network.one_way(OWNER_HOST, HELPER_HOST),
            self.network.one_way(HELPER_HOST, OWNER_HOST),
        ):
            yield

    def wait_until_alone(self) -> None:
        """Wait until the owner has all of its modules."""
        eventually(lambda: modules_place(self.conductor).get("helper") == "", "all modules are at the owner")

    def wait_until_idle(self) -> None:
        """Wait until all instances serve with their own pages, all free, and no page of a pool is in use."""

        def is_idle() -> bool:
            states, serving, free, users = samples(
                self.conductor,
                "mooncake_requests_by_state",
                "mooncake_instance_state",
                "mooncake_instance_free_device_pages",
                "mooncake_pool_users",
            )
            num_serving = sum(number for labels, number in serving.items() if 'state="serving"' in labels)
            expected = {f'instance="{name}"': number for name, number in NUM_PAGES.items()}
            return num_serving == 3 and free == expected and not any([*states.values(), *users.values()])

        eventually(is_idle, "every page and request is given back")


@contextlib.contextmanager
def running(model: Path, folder: Path) -> Iterator[Cluster]:
    """Make a context with a running cluster, and this thread beside its hosts. Raises Unavailable."""
    ClusterKey.generate().save(folder / "key")
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n")
    with tempfile.TemporaryDirectory(prefix="mc-") as run_dir:
        size = f"--kvcache-device-bytes={NUM_PAGES['prefill-0'] * PAGE_BYTES}"
        with tiny_server(model, Path(run_dir), size) as alone:
            expected = [text_of(complete(alone, prompt=one, num_tokens=NUM_TOKENS)) for one in PROMPTS]
            expected_long = text_of(complete(alone, prompt=LONG, num_tokens=NUM_LONG))
    with hosts((OWNER_HOST, HELPER_HOST)) as network, contextlib.ExitStack() as stack:
        stack.enter_context(network.hub.entered())
        hub = dataclasses.replace(network.hub, address="127.0.0.1")  # from where operators may give orders
        find = f"--conductor-endpoint=tcp://{network.hub.address}:7800"
        nodes = {}

        def start(name: str, role: str, place: Place, address: str, *flags: str) -> None:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
            arguments = (f"--model={model}", f"--security-key-file={folder / 'key'}", *SMALL, find, *flags)
            if role != "conductor":
                size = f"--kvcache-device-bytes={NUM_PAGES[name] * PAGE_BYTES}"
                arguments += (f"--instance={name}", f"--messenger-hosts={address}", size)
            node = HostServer(
                place, f"--role={role}", *arguments, run_dir=run_dir, port=8000, hosts_file=names
            )
            nodes[name] = node.start()  # each node has a mount namespace of its own, and so is a host
            stack.callback(partial(HostServer.__exit__, node))

        reply = f"--conductor-reply-endpoint=tcp://{network.hub.address}:*"
        policy = ("--conductor-rebalancing=false", "--conductor-migrate-for-slos=false")
        start("conductor", "conductor", hub, hub.address, reply, "--conductor-inlining=false", *policy)
        start("prefill-0", "prefill", hub, network.hub.address)
        for name, host in (("decode-0", OWNER_HOST), ("decode-1", HELPER_HOST)):
            place = network.hosts[host]
            start(name, "decode", place, place.address, f"--worker-modules-listen={place.address}:7300")
        nodes["conductor"].wait_for_line("^ready in")
        cluster = Cluster(network, nodes, expected, expected_long)  # type: ignore[arg-type]
        cluster.wait_until_idle()
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tmp_path_factory.mktemp("wide") / "tiny"
    tiny_model("llama3", model, hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    write_tiny_tokenizer(model)
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(running(model, tmp_path_factory.mktemp("nodes")))
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield made


def _killed(name: str) -> Callable[[Cluster, Clients, random.Random], None]:
    return lambda cluster, clients, rng: cluster.signal(name, signal.SIGKILL)


def _helper_stopped(cluster: Cluster, clients: Clients, rng: random.Random) -> None:
    cluster.signal("decode-1", signal.SIGSTOP)
    try:
        cluster.wait_until_alone()
    finally:
        cluster.signal("decode-1", signal.SIGCONT)


def _apart(cluster: Cluster, clients: Clients, rng: random.Random) -> None:
    with cluster.apart():
        cluster.wait_until_alone()


def _apart_for_a_moment(cluster: Cluster, clients: Clients, rng: random.Random) -> None:
    with cluster.apart():
        clients.go_on_for(rng.uniform(0, _MOMENT_S))


def _slow(cluster: Cluster, clients: Clients, rng: random.Random) -> None:
    with (
        cluster.network.slow(OWNER_HOST, _SLOW_RATE, _LONGEST_WAIT),
        cluster.network.slow(HELPER_HOST, _SLOW_RATE, _LONGEST_WAIT),
    ):
        clients.wait_for_more()


FAULTS = {
    "kill owner": _killed("decode-0"),
    "kill helper": _killed("decode-1"),
    "stop helper": _helper_stopped,
    "apart": _apart,
    "apart for a moment": _apart_for_a_moment,
    "slow link": _slow,
}
"""What happens while modules are away. Each returns when it is over."""


def go_through(cluster: Cluster, part: str, fault: str, rng: random.Random) -> None:
    """Let a fault happen under load, with the modules away, maybe while they are ordered back."""
    move(cluster.conductor, part)
    with cluster.clients() as clients:
        clients.wait_for_more()
        clients.go_on_for(rng.uniform(0, _MOMENT_S))
        if rng.random() < 0.5:
            order_back(cluster.conductor)
        FAULTS[fault](cluster, clients, rng)
        clients.wait_for_more()
    come_back(cluster.conductor)
    cluster.wait_until_idle()


def test_a_link_that_is_silent_for_long_costs_no_answer(cluster: Cluster) -> None:
    go_through(cluster, PARTS[2], "apart", random.Random(0))


@pytest.mark.soak
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("seed", range(4))
def test_faults_cost_no_answer(cluster: Cluster, part: str, seed: int) -> None:
    rng = random.Random(seed)
    for fault in rng.sample(sorted(FAULTS), len(FAULTS)):
        go_through(cluster, part, fault, rng)
