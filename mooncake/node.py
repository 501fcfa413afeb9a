"""What runs on this node: one `ChildSpec` a process, derived from the configuration.

--role all        conductor, and for each instance a messenger and a worker
--role conductor  conductor
--role prefill    one messenger and one worker
--role decode     one messenger and one worker
"""

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mooncake.config import ConductorProcess, Config, MessengerProcess, WorkerProcess
from mooncake.errors import ConfigError
from mooncake.messages import Role
from mooncake.rundir import RunDirectory

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to supervise. `config` makes its JSON from the incarnation of the life that starts."""

    name: str
    module: str
    config: Callable[[int], str]
    pass_fds: tuple[int, ...] = ()


def plan_node(config: Config, run_dir: RunDirectory) -> list[ChildSpec]:
    """The processes of this node, in the order in which they are started.

    Creates the pool segments: their memory is taken here, all at once, so that a node which does not
    have it fails at start and not under load.
    """
    if config.role == "all":
        local = {name: f"ipc://{run_dir.socket(name)}" for name in ("conductor", "reply")}
        conductor = config.conductor.model_copy(
            update={"endpoint": local["conductor"], "reply_endpoint": local["reply"]}
        )
        config = config.model_copy(update={"conductor": conductor})
    instances = _instances(config, run_dir)
    _check_memory(config, len(instances))
    specs = [_conductor(config)] if config.role in ("all", "conductor") else []
    for index, (name, role) in enumerate(instances):
        # Sockets are numbered: a host's name may be longer than a socket's path.
        sockets = run_dir.socket(f"worker-{index}"), run_dir.socket(f"peers-{index}")
        specs += _instance(config, sockets, name, role, len(instances))
    return specs


def _instances(config: Config, run_dir: RunDirectory) -> list[tuple[str, Role]]:
    if config.role == "all":
        counts = {Role.PREFILL: config.num_prefill, Role.DECODE: config.num_decode}
        return [(f"{role.value}-{index}", role) for role, count in counts.items() for index in range(count)]
    if config.role == "conductor":
        return []
    # Two nodes may have one hostname, but a name belongs to one instance.
    name = config.instance or f"{config.role}-{socket.gethostname()}-{run_dir.unique_name}"
    return [(name, Role(config.role))]


def _check_memory(config: Config, num_instances: int) -> None:
    """Taking more memory than there is would not fail: it would get some process killed."""
    wanted = num_instances * int(config.kvcache.pool_bytes)
    available = _available_bytes()
    if available is not None and wanted > available:
        raise ConfigError(
            f"kvcache.pool_bytes: the pools of {num_instances} instances take {wanted / GIB:.1f} GiB, "
            f"{available / GIB:.1f} GiB of memory are available on this node"
        )


def _available_bytes() -> int | None:
    """Memory that this process may still take: the machine's, or its control group's if that is less."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((group / "memory.max").read_text())  # "max" when there is none
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text())
        reclaimable = int(statistics["active_file"]) + int(
            statistics["inactive_file"]
        )  # a file that was read
        available = min(available, limit - used + reclaimable)
    return available


def _conductor(config: Config) -> ChildSpec:
    process = ConductorProcess(config=config)
    return ChildSpec("conductor", "conductor.service", lambda _: process.model_dump_json())


def _instance(
    config: Config, sockets: tuple[str, str], name: str, role: Role, num_local_workers: int
) -> list[ChildSpec]:
    segment_fd = create_segment(name, int(config.kvcache.pool_bytes))
    worker_socket, peer_socket = sockets

    def messenger(incarnation: int) -> str:
        return MessengerProcess(
            settings=config.messenger,
            instance=name,
            incarnation=incarnation,
            worker_socket=worker_socket,
            peer_socket=peer_socket,
            segment_fd=segment_fd,
        ).model_dump_json()

    def worker(incarnation: int) -> str:
        return WorkerProcess(
            config=config,
            role=role,
            instance=name,
            incarnation=incarnation,
            messenger_socket=worker_socket,
            num_local_workers=num_local_workers,
        ).model_dump_json()

    return [
        ChildSpec(f"{name}/messenger", "kvstore.service", messenger, pass_fds=(segment_fd,)),
        ChildSpec(name, "workers.service", worker),
    ]


def create_segment(name: str, size_bytes: int) -> int:
    """An anonymous shared-memory file of `size_bytes`, all of it allocated. Gone with its last user."""
    descriptor = os.memfd_create(f"mooncake-{name}")
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"kvcache.pool_bytes: no {size_bytes} bytes of shared memory for {name}: {error.strerror}"
        ) from None
    return descriptor
