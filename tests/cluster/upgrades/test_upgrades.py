"""A cluster is upgraded node by node, and back, under load: no request is lost, and each answer is right."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conductor.front.generation import link
from mooncake.messages.workers import SPOKEN
from mooncake.versions import Versions
from tests.cluster.forked import ForkedServer, supervise
from tests.cluster.tiny_cluster import metric
from tests.cluster.upgrades.clients import Clients
from tests.cluster.upgrades.cluster import INSTANCES, ROLES, Cluster
from tests.cluster.upgrades.last_release import LastRelease, checked_out
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LastRelease]:
    with checked_out(tmp_path_factory.mktemp("release")) as found:
        yield found


@pytest.fixture
def cluster(tiny: Path, tmp_path: Path, release: LastRelease) -> Iterator[Cluster]:
    with EtcdServer(tmp_path) as etcd, Cluster(tiny, tmp_path, etcd, release) as started:
        yield started


def replace(cluster: Cluster, clients: Clients, name: str, *, is_old: bool = False) -> None:
    """Replace a node under load, and let it take part: KVCache and requests go to and from others."""
    cluster.replace(name, is_old=is_old)
    clients.wait_for_more()
    if name in INSTANCES:
        clients.wait_until(lambda: cluster.has_transferred(name), f"{name} exchanges KVCache with others")
    if ROLES[name] == "decode":
        num_before = cluster.num_moved()

        def has_moved_one() -> bool:
            cluster.order_moves()
            return cluster.num_moved() > num_before

        clients.wait_until(has_moved_one, "a request has moved")


def test_one_node_of_each_kind_is_upgraded_and_the_last_one_goes_back(cluster: Cluster) -> None:
    with Clients(cluster) as clients:
        for name in ("p0", "c1", "c0", "f0", "d0"):
            replace(cluster, clients, name)
        assert_another_version_is_refused(cluster)
        replace(cluster, clients, "d0", is_old=True)
    cluster.wait_until_idle()


def assert_another_version_is_refused(cluster: Cluster) -> None:
    """A front two versions ahead says what is to be done, and ends."""
    what = f"upgrade the conductor to a release that speaks {SPOKEN.newest + 1} first"
    with AnotherFront(*cluster.node_flags("f0"), run_dir=cluster.run_dir(), until=what) as server:
        server.process.wait(DEADLINE_S)
    assert server.process.returncode == 1


class AnotherFront(ForkedServer):
    """A front that names later versions; all else is as in this tree."""

    @property
    def _supervise(self) -> Callable[[list[str]], None]:
        return _supervise_another_version


def _supervise_another_version(arguments: list[str]) -> None:
    link.SPOKEN = Versions(SPOKEN.newest + 1, SPOKEN.newest + 2)  # type: ignore[attr-defined]
    supervise(arguments)


@pytest.mark.soak
def test_all_nodes_are_upgraded_in_any_order_and_the_last_one_goes_back(cluster: Cluster) -> None:
    order = random.SystemRandom().sample(list(ROLES), len(ROLES))
    print(order)
    with Clients(cluster) as clients:
        for name in order:
            replace(cluster, clients, name)
        replace(cluster, clients, order[-1], is_old=True)
        replace(cluster, clients, order[-1])
    cluster.wait_until_idle()
    for kind, number in (("front", 3), ("instance", 4)):
        labels = {"kind": kind, "version": str(SPOKEN.newest)}
        assert metric(cluster.leader(), "mooncake_protocol_version_peers", **labels) == number
