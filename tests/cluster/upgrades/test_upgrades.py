"""A cluster is upgraded node by node, and back, under load: no request is lost, and each answer is right."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.tiny_cluster import metric
from tests.cluster.upgrades.clients import Clients
from tests.cluster.upgrades.cluster import ROLES, Cluster
from tests.cluster.upgrades.last_release import LastRelease, checked_out
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
    """Replace a node under load, and let it take part."""
    cluster.migrate_all()
    cluster.replace(name, is_old=is_old)
    clients.wait_for_more()


def test_one_node_of_each_kind_is_upgraded_and_one_goes_back(cluster: Cluster) -> None:
    with Clients(cluster) as clients:
        for name in ("d0", "c1", "c0", "f0", "p0"):
            replace(cluster, clients, name)
        replace(cluster, clients, "p0", is_old=True)
    cluster.wait_until_idle()


@pytest.mark.soak
def test_all_nodes_are_upgraded_in_any_order_and_the_last_one_goes_back(cluster: Cluster) -> None:
    order = random.sample(list(ROLES), len(ROLES))
    with Clients(cluster) as clients:
        for name in order:
            replace(cluster, clients, name)
        replace(cluster, clients, order[-1], is_old=True)
        replace(cluster, clients, order[-1])
    cluster.wait_until_idle()
    for kind, number in (("front", 3), ("instance", 4)):
        assert metric(cluster.leader(), "mooncake_protocol_version_peers", kind=kind, version="28") == number
