"""Faults that a cluster has to bear, each with the effects that clients must accept.

Owns: what is done to processes, links, disks. Does not know: when it is done, and what must be true
afterwards.
"""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cluster import CONDUCTORS, ETCD, FRONTS, INSTANCES, NODES, Cluster, signal_process
from tests.cluster.harness import eventually

HOSTS = tuple(dict.fromkeys(host for host, _ in NODES.values()))
_LOST_PERCENT = 15
_CGROUPS, _MORE_MEMORY_BYTES = Path("/sys/fs/cgroup/memory"), 1 << 20
_SLOW_RATE, _LONGEST_WAIT = "400kbit", "400ms"
_JUMPS_S = (-86_400, -3_600, -30, 30, 3_600, 86_400)


@dataclass(frozen=True)
class Fault:
    """A fault. `applied` is a context in which it happens.

    If it `lasts`, it goes on until the end of the context; otherwise it happens once. Clients of `fronts` may
    lose their connections.
    """

    name: str
    applied: contextlib.AbstractContextManager[None]
    lasts: bool = True
    fronts: tuple[str, ...] = ()


Make = Callable[[Cluster, random.Random], Fault]


def _victim(cluster: Cluster, rng: random.Random, kind: str) -> str:
    """Return the name of a process of this kind, as `Cluster.processes` names it."""
    if kind == "leader":
        return cluster.leader() or rng.choice(CONDUCTORS)
    if kind == "standby":
        return cluster.standby() or rng.choice(CONDUCTORS)
    if kind == "front":
        return rng.choice(FRONTS)
    instance = rng.choice([name for name in INSTANCES if kind == "messenger" or NODES[name][1] == kind])
    return f"{instance}/messenger" if kind == "messenger" else instance


def _kill(kind: str) -> Make:
    def make(cluster: Cluster, rng: random.Random) -> Fault:
        victim = _victim(cluster, rng, kind)
        return Fault(f"kill {kind}", _killed(cluster, victim), lasts=False, fronts=_fronts(victim))

    return make


def _fronts(victim: str) -> tuple[str, ...]:
    return (victim,) if victim in FRONTS else ()


@contextlib.contextmanager
def _killed(cluster: Cluster, victim: str) -> Iterator[None]:
    if (pid := cluster.processes().get(victim)) is not None:
        signal_process(pid, signal.SIGKILL)
    yield


def _stop(kind: str) -> Make:
    def make(cluster: Cluster, rng: random.Random) -> Fault:
        victim = _victim(cluster, rng, kind)
        return Fault(f"stop {kind}", _stopped(cluster, victim), fronts=_fronts(victim))

    return make


@contextlib.contextmanager
def _stopped(cluster: Cluster, victim: str) -> Iterator[None]:
    pid = cluster.processes().get(victim)
    if pid is None:
        yield
        return
    signal_process(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        signal_process(pid, signal.SIGCONT)


def _kill_node(cluster: Cluster, rng: random.Random) -> Fault:
    """Kill a node's supervisor, which ends its processes, and start the node again."""
    node = rng.choice(list(NODES))
    return Fault("kill node", _node_killed(cluster, node), lasts=False, fronts=_fronts(node))


@contextlib.contextmanager
def _node_killed(cluster: Cluster, name: str) -> Iterator[None]:
    children = cluster.nodes[name].children().values()
    cluster.nodes[name].process.kill()
    yield
    for pid in children:  # one that another fault has stopped does not see that its supervisor has ended
        signal_process(pid, signal.SIGCONT)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "its processes end")
    cluster.restart_node(name)


def _kill_etcd(cluster: Cluster, rng: random.Random) -> Fault:
    return Fault("kill etcd", _etcd_killed(cluster))


@contextlib.contextmanager
def _etcd_killed(cluster: Cluster) -> Iterator[None]:
    cluster.etcd.kill()
    try:
        yield
    finally:
        cluster.etcd.start()


def _of_link(name: str, places: tuple[str, ...] = HOSTS) -> Make:
    def make(cluster: Cluster, rng: random.Random) -> Fault:
        host, network = rng.choice(places), cluster.network
        match name:
            case "mute":
                context = network.mute(host)
            case "deaf":
                context = network.deaf(host)
            case "cut off":
                context = _both(network.mute(host), network.deaf(host))
            case "lossy":
                context = network.lossy(host, _LOST_PERCENT)
            case _:
                context = network.slow(host, _SLOW_RATE, _LONGEST_WAIT)
        label = f"{name} host" if places == HOSTS else f"{name} etcd"
        return Fault(label, context, fronts=cluster.fronts_on(host))

    return make


def _between(name: str, *, with_etcd: bool) -> Make:
    def make(cluster: Cluster, rng: random.Random) -> Fault:
        one, other = rng.sample(HOSTS, 2)
        if with_etcd:
            leader = cluster.leader()
            one, other = (cluster.host_of(leader) if leader else one), ETCD
            one, other = rng.sample((one, other), 2) if name == "one way" else (one, other)
        context = cluster.network.one_way(one, other)
        if name == "apart":
            context = _both(context, cluster.network.one_way(other, one))
        return Fault(f"{name}: {'leader and etcd' if with_etcd else 'two hosts'}", context)

    return make


@contextlib.contextmanager
def _both(*contexts: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _fill_disk(cluster: Cluster, rng: random.Random) -> Fault:
    return Fault("full disk", _disk_filled(cluster, rng.choice(HOSTS)))


@contextlib.contextmanager
def _disk_filled(cluster: Cluster, host: str) -> Iterator[None]:
    """Make a context in which a host's disk is full, and half of the SSD slots have no space on it.

    Writes to these slots fail then, as on a thin volume.
    """
    disk = cluster.disk_of(host)
    for slab in disk.glob("*.slab"):
        with slab.open("r+b") as slots:
            half = os.fstat(slots.fileno()).st_size // 2
            _punch_hole(slots.fileno(), half, half)
    filling = disk / "filling"
    with filling.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        yield
    finally:
        filling.unlink()


def _punch_hole(descriptor: int, offset: int, num_bytes: int) -> None:
    import ctypes

    keep_size_and_punch = 0x01 | 0x02
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.fallocate(descriptor, keep_size_and_punch, ctypes.c_long(offset), ctypes.c_long(num_bytes))
    if done:
        raise OSError(ctypes.get_errno(), "fallocate")


def _flip_bits(cluster: Cluster, rng: random.Random) -> Fault:
    return Fault("flip bits", _bits_flipped(cluster, rng.choice(INSTANCES), rng), lasts=False)


@contextlib.contextmanager
def _bits_flipped(cluster: Cluster, instance: str, rng: random.Random) -> Iterator[None]:
    """Flip a bit of the block in each SSD slot of an instance."""
    for slab in cluster.disk_of(cluster.host_of(instance)).glob(f"{instance}*.slab"):
        with slab.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for offset in range(size // 8, size, 1024):  # behind the table
                at = min(offset + rng.randrange(1024), size - 1)
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << rng.randrange(8)]), at)
    yield


def _no_memory(cluster: Cluster, rng: random.Random) -> Fault:
    victim = _victim(cluster, rng, rng.choice(("prefill", "decode", "messenger")))
    return Fault("no memory", _memory_limited(cluster, victim))


@contextlib.contextmanager
def _memory_limited(cluster: Cluster, victim: str) -> Iterator[None]:
    """Make a context in which the kernel kills a process that allocates much more memory than it has."""
    pid = cluster.processes().get(victim)
    group = _CGROUPS / f"chaos-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(_MORE_MEMORY_BYTES))
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (_CGROUPS / "cgroup.procs").write_text(left)
        eventually(lambda: not (group / "cgroup.procs").read_text(), "nothing is left in the group")
        group.rmdir()


def _jump(cluster: Cluster, rng: random.Random) -> Fault:
    assert cluster.clocks is not None
    _, pid = rng.choice(sorted(cluster.processes().items()))
    return Fault("clock jumps", cluster.clocks.wrong(pid, rng.choice(_JUMPS_S)))


FAULTS: dict[str, Make] = {
    **{
        f"kill {kind}": _kill(kind)
        for kind in ("leader", "standby", "front", "prefill", "decode", "messenger")
    },
    "kill node": _kill_node,
    "kill etcd": _kill_etcd,
    **{
        f"stop {kind}": _stop(kind)
        for kind in ("leader", "standby", "front", "prefill", "decode", "messenger")
    },
    **{f"{name} host": _of_link(name) for name in ("mute", "deaf", "cut off", "lossy", "slow")},
    "cut off etcd": _of_link("cut off", (ETCD,)),
    "one way: two hosts": _between("one way", with_etcd=False),
    "apart: two hosts": _between("apart", with_etcd=False),
    "one way: leader and etcd": _between("one way", with_etcd=True),
    "apart: leader and etcd": _between("apart", with_etcd=True),
    "clock jumps": _jump,
    "full disk": _fill_disk,
    "flip bits": _flip_bits,
    **({"no memory": _no_memory} if (_CGROUPS / "memory.limit_in_bytes").exists() else {}),
}
"""All faults by name. Each chooses its victim by the cluster's state and the seed."""
