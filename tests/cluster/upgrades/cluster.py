"""A cluster that is upgraded node by node, behind a load balancer, with workers that are slowed."""

import contextlib
import itertools
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mooncake.security.keys import ClusterKey
from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.slowed import SlowedServer
from tests.cluster.tiny_cluster import SMALL, TRANSFERS, is_ready, metric, samples, wait_until_idle
from tests.cluster.upgrades.last_release import LastRelease, OldServer
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer
from tests.ports import free_port

ROLES = {
    "c0": "conductor",
    "c1": "conductor",
    "f0": "front",
    "f1": "front",
    "p0": "prefill",
    "p1": "prefill",
    "d0": "decode",
    "d1": "decode",
}
"""The nodes with their roles, two of each."""
INSTANCES = tuple(name for name, role in ROLES.items() if role in ("prefill", "decode"))


class Cluster:
    """A cluster whose nodes are all of the last release at first. Use as a context manager."""

    def __init__(self, model: Path, folder: Path, etcd: EtcdServer, release: LastRelease) -> None:
        ClusterKey.generate().save(folder / "key")
        self._release = release
        self._flags = [f"--model={model}", *SMALL, TRANSFERS, f"--security-key-file={folder / 'key'}"]
        self._flags += [
            f"--cluster-etcd-endpoints={etcd.url}",
            "--conductor-reply-endpoint=tcp://127.0.0.1:*",
        ]
        # A busy machine is not silent for so long.
        self._flags += ["--conductor-peer-timeout-s=20", f"--conductor-placement-timeout-s={DEADLINE_S}"]
        self._flags += [
            "--cluster-etcd-lease-s=10",
            "--hang-timeout-s=never",
            "--conductor-rebalancing=false",
        ]
        self._nodes: dict[str, Server] = {}
        self._stack = contextlib.ExitStack()
        self._balancer = _Balancer()

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            stack.callback(self.__exit__)
            with ThreadPoolExecutor() as threads:
                for starting in [threads.submit(self._start, name, is_old=True) for name in ROLES]:
                    starting.result()
            eventually(lambda: self.num_instances() == len(INSTANCES), "all instances are there")
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.__exit__, self._nodes.values()))
        self._stack.close()

    def node_flags(self, name: str) -> list[str]:
        """Return the flags of a node, except for its port."""
        flags = [f"--role={ROLES[name]}", *self._flags]
        if name in INSTANCES:
            flags.append(f"--instance={name}")
        if ROLES[name] == "conductor":
            flags.append(f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}")
        return flags

    def run_dir(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))

    def _start(self, name: str, *, is_old: bool) -> None:
        """Start a node, and wait until it serves."""
        if is_old:
            server: Server = OldServer(self._release, *self.node_flags(name), run_dir=self.run_dir())
        else:
            server = SlowedServer(*self.node_flags(name), run_dir=self.run_dir())
        self._nodes[name] = server
        server.__enter__()
        if ROLES[name] == "front":
            eventually(lambda: is_ready(server), "it is ready")
            self._balancer.add(server)

    def replace(self, name: str, *, is_old: bool = False) -> None:
        """End a node as an operator does, and start it again from this tree or from the last release."""
        server = self._nodes[name]
        if ROLES[name] == "front":
            self._balancer.remove(server)
        server.__exit__()
        assert server.process.returncode == 0, server.lines
        self._start(name, is_old=is_old)

    def asked(self) -> contextlib.AbstractContextManager[Server]:
        """Return a context with a front to which the load balancer sends one request."""
        return self._balancer.asked()

    def leader(self) -> Server:
        """Wait until a Conductor leads and has pairs, and return it."""
        found: list[Server] = []

        def leads() -> bool:
            conductors = [self._nodes[name] for name, role in ROLES.items() if role == "conductor"]
            found[:] = [server for server in conductors if is_ready(server)]
            return bool(found)

        eventually(leads, "a conductor leads, and has pairs")
        return found[0]

    def num_instances(self) -> float:
        """Return the number of instances that are registered at the leader."""
        return sum(metric(self.leader(), "mooncake_instances", role=role) for role in ("prefill", "decode"))

    def has_transferred(self, name: str) -> bool:
        """Return whether an instance has exchanged KVCache with others since it was started."""
        [transfers] = samples(self.leader(), "mooncake_transfer_bytes_total")
        return any(num for labels, num in transfers.items() if f'instance="{name}"' in labels)

    def num_moved(self) -> float:
        """Return the number of requests that an operator's orders have moved."""
        return metric(self.leader(), "mooncake_migrations_total", reason="by_hand", outcome="moved")

    def order_moves(self) -> None:
        """Order all running requests to move to other decode instances. Some may end before."""
        url = self.leader().url
        for request in HTTP.get(f"{url}/dashboard/state", timeout=DEADLINE_S).json()["requests"]:
            if not request["is_over"]:
                HTTP.post(f"{url}/admin/requests/{request['id']}/migrate", timeout=DEADLINE_S)

    def wait_until_idle(self) -> None:
        wait_until_idle(self.leader(), instances=INSTANCES)


class _Balancer:
    """A load balancer that gives each request to the next front."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._fronts: list[Server] = []
        self._num_asked = Counter[Server]()
        self._turns = itertools.count()

    def add(self, front: Server) -> None:
        with self._changed:
            self._fronts.append(front)

    def remove(self, front: Server) -> None:
        """Give a front no more requests, and wait until its requests are answered."""
        with self._changed:
            self._fronts.remove(front)
            assert self._changed.wait_for(lambda: not self._num_asked[front], DEADLINE_S)

    @contextlib.contextmanager
    def asked(self) -> Iterator[Server]:
        with self._changed:
            front = self._fronts[next(self._turns) % len(self._fronts)]
            self._num_asked[front] += 1
        try:
            yield front
        finally:
            with self._changed:
                self._num_asked[front] -= 1
                self._changed.notify_all()
