"""The plan of this node's processes: one `ChildSpec` each, derived from the configuration.

--role all        conductor, and for each instance a messenger and a worker
--role conductor  conductor
--role prefill    one messenger and one worker, for each stage of a pipeline or rank of a group
--role decode     one messenger and one worker, for each rank of a group
--role both       one messenger and one worker, for each rank of a group
--role front      a front beside that of the conductor
--role pool       one messenger, for each rank of an engine that is started by other means

Owns: the choice of processes, and the addresses that they share. Does not know: how they are started
(`mooncake.node.supervisor`), how memory is taken (`mooncake.node.segments`).
"""

import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mooncake.config.sections import MessengerConfig, Section
from mooncake.config.settings import Config
from mooncake.endpoints import bracketed
from mooncake.errors import ConfigError
from mooncake.messages.workers import Role
from mooncake.node.lives import Life
from mooncake.node.process_config import (
    PASS_RECORD_BYTES,
    ConductorProcess,
    FrontProcess,
    MessengerProcess,
    RankConfig,
    StageConfig,
    WorkerProcess,
)
from mooncake.node.rundir import Run, RunDirectory
from mooncake.node.segments import check_memory, create_segment
from mooncake.security.keys import ClusterKey

_SectionT = TypeVar("_SectionT", bound=Section)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to supervise. `config` returns the JSON with which an incarnation is started."""

    name: str
    module: str
    config: Callable[[Life], str]
    pass_fds: tuple[int, ...] = ()
    drains: bool = False
    """Whether the process finishes its requests on SIGTERM; on SIGINT it never does.

    The processes of the node that do not drain end after those that do.
    """
    instance: str | None = None
    """The instance to which the process belongs; None for other processes."""
    after_end: Callable[[Life], Awaitable[None]] | None = None
    """A coroutine function that is called after an incarnation's end, before the next start; None without."""


@dataclass(frozen=True, slots=True)
class _Part:
    """An instance, or one of its stages or ranks, with a messenger, and a worker if it has a role."""

    instance: str
    role: Role | None
    stage: StageConfig
    rank: RankConfig

    @property
    def leads(self) -> bool:
        """Whether the part is the instance's first stage and rank."""
        return self.stage.number == 0 and self.rank.number == 0

    @property
    def name(self) -> str:
        return self.rank.part_of(self.stage.part_of(self.instance))


def plan_node(config: Config, run_dir: RunDirectory) -> list[ChildSpec]:
    """Return the processes of this node, in the order in which they are started.

    This creates the pool segments. Their memory is allocated here, all at once, so that a node without enough
    memory fails at start and not under load. Raises ConfigError.
    """
    if config.is_alone:
        local = {name: f"ipc://{run_dir.socket(name)}" for name in ("conductor", "reply")}
        conductor = config.conductor.model_copy(
            update={
                "endpoint": local["conductor"],
                "listen_endpoint": None,
                "reply_endpoint": local["reply"],
                "reply_listen_endpoint": None,
            }
        )
        config = config.model_copy(update={"conductor": conductor})
    http_port = config.http.port or None if config.has_api else None
    run_dir.describe(Run(config.role, config.cluster_address, http_port))
    key = _cluster_key(config)
    parts = _parts(config, run_dir)
    check_memory([part.name for part in parts], config.kvcache)
    _check_directories(config)
    specs = []
    if config.role in ("all", "conductor"):
        specs.append(_conductor(config, key, _state_file(config, run_dir)))
    elif config.role == "front":
        specs.append(_front(config, key, _name_of_node(config, run_dir)))
    for index, part in enumerate(parts):
        # Sockets are numbered: a host's name may be longer than a socket's path.
        sockets = {
            kind: run_dir.socket(f"{kind}-{index}")
            for kind in ("worker", "peers", "events", "replay", "modules")
        }
        if config.kvcache.socket is not None:
            sockets["worker"] = _own_socket(config.kvcache.socket, index, sockets["worker"])
        specs.append(_messenger(config, key, index, sockets, part))
        if part.role is not None:
            specs.append(_worker(config, key, index, sockets, part, part.role, len(parts)))
    return specs


def _own_socket(path: Path, index: int, usual: str) -> str:
    """Return the configured socket path for part `index`, and link the path `usual` to it."""
    socket_path = _port_higher(str(path.absolute()), index)
    os.symlink(socket_path, usual)
    return socket_path


def _cluster_key(config: Config) -> ClusterKey:
    """Return the configured cluster key, or a new one for a cluster that is all on this node.

    Raises ConfigError for a key that cannot be read, or if other hosts need the key and none is configured.
    """
    if config.security.key_file is not None:
        return ClusterKey.load(config.security.key_file)
    if config.is_alone:
        if config.kvcache.listen is not None:
            raise ConfigError(
                "kvcache.listen is for clients on other hosts, who need the cluster's key: make one with"
                " `mooncake-serve keygen cluster.key` and name it with --security-key-file cluster.key"
            )
        return ClusterKey.generate()
    raise ConfigError(
        f"role {config.role} needs security.key_file, the key that all nodes of the cluster share:"
        " make it once with `mooncake-serve keygen cluster.key`, copy the file to every node, and start each"
        " with --security-key-file cluster.key"
    )


def _instances(config: Config, run_dir: RunDirectory) -> list[tuple[str, Role | None]]:
    if not config.has_api:
        role = None if config.role == "pool" else Role(config.role)
        return [(config.instance or _name_of_node(config, run_dir), role)]
    counts = config.num_instances.items()
    return [(f"{role.value}-{index}", role) for role, count in counts for index in range(count)]


def _name_of_node(config: Config, run_dir: RunDirectory) -> str:
    """Return a name for an instance or front, unique even among nodes with one hostname."""
    return f"{config.role}-{socket.gethostname()}-{run_dir.unique_name}"


def _parts(config: Config, run_dir: RunDirectory) -> list[_Part]:
    """Return the instances of this node, or their stages and ranks."""
    parts = []
    for index, (name, role) in enumerate(_instances(config, run_dir)):
        pipeline = config.pipeline
        num_stages = pipeline.stages if role is Role.PREFILL else 1
        endpoints = pipeline.endpoints or [
            f"ipc://{run_dir.socket(f'stage-{index}-{stage}')}" for stage in range(num_stages - 1)
        ]
        here = range(num_stages) if pipeline.stage is None else [pipeline.stage]
        parts += [
            _Part(
                name,
                role,
                StageConfig(
                    number=stage,
                    num_stages=num_stages,
                    endpoints=endpoints,
                    listen_endpoint=pipeline.listen_endpoint,
                ),
                rank,
            )
            for stage in here
            for rank in _ranks(config.worker.tensor_parallel, index, run_dir)
        ]
    return parts


def _ranks(size: int, index: int, run_dir: RunDirectory) -> list[RankConfig]:
    """Return the ranks of instance `index` of this node. An instance of several ranks has one stage."""
    endpoints = [f"ipc://{run_dir.socket(f'rank-{index}-{number}')}" for number in range(1, size)]
    meeting = str(run_dir.path / f"ranks-{index}")
    return [
        RankConfig(number=number, size=size, endpoints=endpoints, meeting=meeting) for number in range(size)
    ]


def _check_directories(config: Config) -> None:
    """Check that the SSD directories can be written to. Raises ConfigError.

    The check comes before any process starts, not after the first worker has loaded its model.
    """
    for path in config.kvcache.ssd_dirs if config.has_pool else ():
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"kvcache.ssd_dirs: {path} is no directory that can be written to")


def _state_file(config: Config, run_dir: RunDirectory) -> Path:
    """Return the path of the conductor's state file.

    By default each port has its own file, so that clusters on one host do not share one.
    """
    if config.conductor.state_file is not None:
        return config.conductor.state_file.absolute()
    if config.http.port == 0:
        return run_dir.path / "conductor.db"
    try:
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    except RuntimeError as error:
        raise ConfigError(f"there is no place for conductor.state_file ({error}); name one") from None
    return base / "mooncake-serve" / f"conductor-{config.http.port}.db"


def _conductor(config: Config, key: ClusterKey, state_file: Path) -> ChildSpec:
    def process(life: Life) -> str:
        return ConductorProcess(
            cluster_key=key, config=config, epoch=life.incarnation, state_file=state_file
        ).model_dump_json()

    async def after_end(life: Life) -> None:
        from mooncake.leadership.terms import end_lease  # an HTTP client, for which no start waits

        await end_lease(config.cluster, life.incarnation)

    return ChildSpec(
        "conductor",
        "conductor.process.service",
        process,
        drains=True,
        after_end=after_end if config.cluster.has_standbys else None,
    )


def _front(config: Config, key: ClusterKey, name: str) -> ChildSpec:
    def process(life: Life) -> str:
        return FrontProcess(
            cluster_key=key, config=config, name=name, incarnation=life.incarnation
        ).model_dump_json()

    return ChildSpec("front", "conductor.front.process.service", process, drains=True)


def _messenger(
    config: Config, key: ClusterKey, index: int, sockets: dict[str, str], part: _Part
) -> ChildSpec:
    segment_fd = create_segment(part.name, int(config.kvcache.pool_bytes), config.kvcache.segment_dir)
    if config.is_alone:
        event_endpoints = f"ipc://{sockets['events']}", f"ipc://{sockets['replay']}"
    else:
        event_endpoints = (f"tcp://{bracketed(config.messenger.listens_at[0])}:*",) * 2

    def process(life: Life) -> str:
        return MessengerProcess(
            cluster_key=key,
            settings=_messenger_of_part(config.messenger, index),
            security=config.security,
            kvcache=_of_part(config.kvcache, index, "listen", "vllm_events", "vllm_replay"),
            instance=part.name,
            incarnation=life.incarnation,
            worker_socket=sockets["worker"],
            peer_socket=sockets["peers"],
            event_endpoints=event_endpoints,
            segment_fd=segment_fd,
        ).model_dump_json()

    return ChildSpec(
        f"{part.name}/messenger", "kvstore.server.service", process, (segment_fd,), instance=part.instance
    )


def _worker(
    config: Config,
    key: ClusterKey,
    index: int,
    sockets: dict[str, str],
    part: _Part,
    role: Role,
    num_local_workers: int,
) -> ChildSpec:
    record_fd = _pass_record(part.name)
    worker = _of_part(config.worker, index, "metrics_listen", "modules_listen")

    def process(life: Life) -> str:
        return WorkerProcess(
            cluster_key=key,
            config=config.model_copy(update={"worker": worker}),
            role=role,
            instance=part.instance,
            incarnation=life.incarnation,
            messenger_socket=sockets["worker"],
            modules_socket=sockets["modules"],
            num_local_workers=num_local_workers,
            stage=part.stage,
            rank=part.rank,
            previous_end=life.previous_end,
            pass_record_fd=record_fd,
        ).model_dump_json()

    return ChildSpec(
        part.name,
        "workers.vllm.service" if config.engine == "vllm" else "workers.process.service",
        process,
        (record_fd,),
        drains=part.leads and config.runs_one_instance,  # else the node's front drains
        instance=part.instance,
    )


def _pass_record(name: str) -> int:
    """Return the descriptor of new memory for a worker's pass record (`workers.execution.pass_record`)."""
    descriptor = os.memfd_create(f"mooncake-{name}-pass")
    os.ftruncate(descriptor, PASS_RECORD_BYTES)
    return descriptor


def _of_part(section: _SectionT, index: int, *names: str) -> _SectionT:
    """Return a section for part `index` of a node.

    The addresses in the fields `names` have ports higher by `index`, or are paths with `-index` at the end
    (not for part 0).
    """
    addresses = {name: getattr(section, name) for name in names}
    return section.model_copy(
        update={name: _port_higher(address, index) for name, address in addresses.items() if address}
    )


def _messenger_of_part(settings: MessengerConfig, index: int) -> MessengerConfig:
    """Return the messenger section for part `index` of a node, with a port higher by `index`."""
    return settings.model_copy(update={"port": settings.port + index if settings.port else 0})


def _port_higher(address: str, num_ports: int) -> str:
    place, _, port = address.rpartition(":")
    if port.isdigit():
        return f"{place}:{int(port) + num_ports}" if int(port) else address
    return address if port == "*" or not num_ports else f"{address}-{num_ports}"  # an ipc path
