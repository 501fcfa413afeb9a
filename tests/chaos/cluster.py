"""A cluster on three hosts that can each be lost: two conductors, two fronts, four instances; and an etcd.

Owns: which node runs on which host, restarts of nodes, when the cluster is complete and idle. Does not know:
faults, requests.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx

from mooncake.security.keys import ClusterKey
from tests.chaos.clocks import Clocks
from tests.chaos.host_server import HostServer
from tests.chaos.network import Network, Place, hosts
from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import ONE_THREAD, is_ready, samples, wait_until_idle
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

LONGEST_TOKENS = 4096
_BLOCK_BYTES = 8 * 4 * 1 * 2 * 16 * 4
POOL_BYTES, DEVICE_BYTES, SSD_BYTES, DISK_BYTES = 2 << 20, 32 << 20, 8 << 20, 24 << 20
NUM_PAGES = DEVICE_BYTES // _BLOCK_BYTES
HANG_TIMEOUT_S = 15
ABSENCE_TIMEOUT_S = 30
ETCD = "etcd"
NODES = {
    "conductor-a": ("a", "conductor"),
    "front-a": ("a", "front"),
    "p0": ("a", "prefill"),
    "conductor-b": ("b", "conductor"),
    "front-b": ("b", "front"),
    "d0": ("b", "decode"),
    "p1": ("c", "prefill"),
    "d1": ("c", "decode"),
}
"""The host and the role of each node.

If any one host is lost, there are still a conductor, a front and a pair of instances.
"""
CONDUCTORS = ("conductor-a", "conductor-b")
FRONTS = ("front-a", "front-b")
INSTANCES = ("p0", "p1", "d0", "d1")
_PORTS = {"conductor": 8001, "front": 8000}


class Cluster:
    """The nodes of the cluster by name, and its etcd."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        nodes: dict[str, HostServer],
        etcd: EtcdServer,
        clocks: Clocks | None,
    ) -> None:
        self.network, self.folder, self.nodes, self.etcd = network, folder, nodes, etcd
        self.clocks = clocks

    def host_of(self, node: str) -> str:
        return NODES[node][0]

    def disk_of(self, host: str) -> Path:
        """Return the folder of a small file system, in which the processes of a host store their data."""
        return self.folder / f"disk-{host}"

    def fronts_on(self, host: str) -> tuple[str, ...]:
        return tuple(name for name in FRONTS if NODES[name][0] == host)

    def leader(self) -> str | None:
        """Return the name of the conductor that leads and has a pair; None if there is none at present."""
        return next((name for name in CONDUCTORS if is_ready(self.nodes[name])), None)

    def standby(self) -> str | None:
        return next(
            (name for name in CONDUCTORS if _health(self.nodes[name]).get("status") == "standby"), None
        )

    def restart_node(self, name: str) -> None:
        """Start a node whose supervisor has been killed, as an init system does."""
        node = self.nodes[name]
        node.process.wait(DEADLINE_S)
        node.start()

    def wait_until_whole(self) -> str:
        """Wait until the cluster is complete, and return the conductor that leads.

        It is complete when each process runs, one conductor leads and the other is standby, all instances
        serve, and both fronts are ready.
        """
        leader = ""

        def is_whole() -> bool:
            nonlocal leader
            leader, standby = self.leader() or "", self.standby()
            return (
                {leader, standby} == set(CONDUCTORS)
                and _num_serving(self.nodes[leader]) == len(INSTANCES)
                and all(is_ready(self.nodes[name]) for name in FRONTS)
                and all(self.has_its_processes(name) for name in NODES)
            )

        eventually(is_whole, "the cluster is whole again")
        return leader

    def has_its_processes(self, name: str) -> bool:
        """Return whether a node has all of its processes, each once."""
        expected = {name, f"{name}/messenger"} if name in INSTANCES else {NODES[name][1]}
        node = self.nodes[name]
        return node.process.poll() is None and node.children().keys() == expected

    def processes(self) -> dict[str, int]:
        """Return the ids of all processes except etcd's.

        Their names are such as `d0`, `d0/messenger`, `front-a`, `supervisor of d0`.
        """
        found = {}
        for name, node in self.nodes.items():
            if node.process.poll() is None:
                found[f"supervisor of {name}"] = node.process.pid
                for child, pid in node.children().items():
                    found[child if name in INSTANCES else name] = pid
        return found

    def wait_until_nothing_is_held(self) -> None:
        """Wait until no request is known in the cluster, and no page, lease or grant is held."""
        leader = self.wait_until_whole()
        wait_until_idle(self.nodes[leader], num_pages=NUM_PAGES, instances=INSTANCES)
        eventually(lambda: not self.orphans(), "no process is left of those that have ended")

    def orphans(self) -> set[int]:
        """Return the ids of the processes on all hosts that do not descend from a supervisor."""
        supervisors = {node.process.pid for node in self.nodes.values()}
        found = {pid for host, _ in NODES.values() for pid in self.network.hosts[host].pids()}
        return {pid for pid in found if _is_alive(pid) and not supervisors & set(_line_of(pid))}


def _line_of(pid: int) -> Iterator[int]:
    """Yield the ids of a process, of its parent, and so on.

    The line ends early if one of them ends meanwhile.
    """
    with contextlib.suppress(OSError):
        while pid:
            yield pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _health(server: Server) -> dict[str, str]:
    try:
        answer: dict[str, str] = httpx.get(f"{server.url}/health", timeout=5).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return answer


def _num_serving(conductor: Server) -> int:
    try:
        [by_state] = samples(conductor, "mooncake_instance_state")
    except httpx.HTTPError:
        return 0
    return int(sum(number for labels, number in by_state.items() if 'state="serving"' in labels))


@contextlib.contextmanager
def running(folder: Path, clocks: Clocks | None = None) -> Iterator[Cluster]:
    """Make a context with a running cluster. New threads in it are in the network of the hub, like clients.

    `clocks` are needed if clocks of the nodes' processes shall be wrong at times. Raises Unavailable.
    """
    model = folder / "tiny"
    tiny_model("smollm2", model, max_position_embeddings=2 * LONGEST_TOKENS)
    write_tiny_tokenizer(model)
    key = folder / "key"
    ClusterKey.generate().save(key)
    names = tuple(dict.fromkeys(host for host, _ in NODES.values()))
    with hosts((*names, ETCD)) as network, contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_disk(folder / f"disk-{name}"))
        stack.enter_context(network.hub.entered())
        etcd = EtcdServer(folder, host=network.hosts[ETCD].bracketed, network=network.hosts[ETCD].network)
        stack.enter_context(etcd)
        shared = _shared(model, key, etcd.url)
        nodes = {}
        for name, (host, role) in NODES.items():
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
            flags = _flags(name, network.hosts[host], role, folder / f"disk-{host}")
            port = _PORTS.get(role, 0)
            node = HostServer(network.hosts[host], *shared, *flags, run_dir=run_dir, port=port)
            nodes[name] = node.start()
            stack.callback(partial(HostServer.__exit__, node))
        cluster = Cluster(network, folder, nodes, etcd, clocks)  # type: ignore[arg-type]
        cluster.wait_until_whole()
        yield cluster


def _shared(model: Path, key: Path, etcd_url: str) -> list[str]:
    return [
        f"--model={model}",
        f"--security-key-file={key}",
        f"--cluster-etcd-endpoints={etcd_url}",
        "--dtype=float32",
        "--kvcache-block-size=8",
        f"--kvcache-pool-bytes={POOL_BYTES}",
        f"--kvcache-device-bytes={DEVICE_BYTES}",
        f"--kvcache-ssd-bytes={SSD_BYTES}",
        f"--hang-timeout-s={HANG_TIMEOUT_S}",
        f"--conductor-absence-timeout-s={ABSENCE_TIMEOUT_S}",
        "--messenger-transport=tcp",
        ONE_THREAD,
    ]


def _flags(name: str, place: Place, role: str, disk: Path) -> list[str]:
    flags = [f"--role={role}"]
    if role in _PORTS:
        flags += [f"--http-host={place.address}"]
        flags += [
            f"--conductor-reply-endpoint=tcp://{place.bracketed}:{7801 if role == 'conductor' else 7811}"
        ]
    if role == "conductor":
        flags += [f"--conductor-endpoint=tcp://{place.bracketed}:7800"]
        flags += [f"--conductor-state-file={disk / 'conductor.db'}"]
    if role in ("prefill", "decode"):
        flags += [f"--instance={name}", f"--messenger-hosts={place.address}", f"--kvcache-ssd-dirs={disk}"]
    return flags


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def signal_process(pid: int, signum: signal.Signals) -> None:
    """Signal a process. A process that has ended is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
