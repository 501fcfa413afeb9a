"""The arguments of each process: the configuration, and what is particular to the process.

Owns: these models, which travel on stdin. Does not know: how processes are started
(`mooncake.node.supervisor`).
"""

from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator

from mooncake.config.sections import KVCacheConfig, MessengerConfig, Section, SecurityConfig
from mooncake.config.settings import Config
from mooncake.messages.workers import Role
from mooncake.node.lives import ProcessEnd
from mooncake.security.keys import ClusterKey


def _as_key(value: object) -> ClusterKey:
    return value if isinstance(value, ClusterKey) else ClusterKey.from_text(str(value))


class _Process(Section):
    """The arguments of a child process of the supervisor.

    They come on its stdin: every user of the machine can read command lines, and children inherit
    environments.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    cluster_key: Annotated[
        ClusterKey, PlainValidator(_as_key), PlainSerializer(ClusterKey.to_text, when_used="json")
    ]


class ConductorProcess(_Process):
    """The arguments of the conductor process.

    `epoch` grows with every start; `state_file` outlives the process.
    """

    config: Config
    epoch: int
    state_file: Path


class FrontProcess(_Process):
    """The arguments of a front in a process of its own, whose `name` is unique in the cluster."""

    config: Config
    name: str
    incarnation: int


class MessengerProcess(_Process):
    """The arguments of a messenger process.

    `segment_fd` is an inherited descriptor of allocated memory, which has the size of the pool. The worker
    connects to `worker_socket`, messengers on the same host connect to `peer_socket`. The messenger publishes
    KV events at the first of `event_endpoints`, and answers requests for replays and snapshots at the second.
    """

    settings: MessengerConfig
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    kvcache: KVCacheConfig
    instance: str
    incarnation: int
    worker_socket: str
    peer_socket: str
    event_endpoints: tuple[str, str]
    segment_fd: int


class StageConfig(Section):
    """A worker's stage in its instance.

    The next stage finds stage `i` at `endpoints[i]`, so the last stage has no entry. If `listen_endpoint` is
    given, this stage listens there instead of at its own entry.
    """

    number: int = 0
    num_stages: int = 1
    endpoints: list[str] = Field(default_factory=list)
    listen_endpoint: str | None = None

    @property
    def listens_at(self) -> str:
        """The endpoint at which this stage's own socket listens. The last stage has none."""
        return self.listen_endpoint or self.endpoints[self.number]

    def part_of(self, instance: str) -> str:
        """Return the name of this stage of an instance, which has a messenger of its own."""
        return instance if self.num_stages == 1 else f"{instance}.{self.number}"


class RankConfig(Section):
    """A worker's rank in its tensor-parallel instance. All ranks are on one node.

    The first rank listens for each other rank at one of `endpoints`. `meeting` is the beginning of the path
    of the file through which the ranks form a process group.
    """

    number: int = 0
    size: int = 1
    endpoints: list[str] = Field(default_factory=list)
    meeting: str = ""

    def part_of(self, instance: str) -> str:
        """Return the name of this rank of an instance, which has a messenger of its own."""
        return instance if self.size == 1 else f"{instance}.{self.number}"


PASS_RECORD_BYTES = 1 << 16


class WorkerProcess(_Process):
    """The arguments of a worker process. `incarnation` grows with every start.

    `instance` is the name that all stages or ranks of the instance share; `messenger_socket` belongs to this
    stage or rank alone. At `modules_socket` the worker listens for other workers of this host whose modules
    it shall host. `previous_end` is the cause of the previous incarnation's end, None for the first one.
    `pass_record_fd` is an inherited descriptor of `PASS_RECORD_BYTES` of memory that outlives the process.
    """

    config: Config
    role: Role
    instance: str
    incarnation: int
    messenger_socket: str
    modules_socket: str
    num_local_workers: int
    stage: StageConfig = StageConfig()
    rank: RankConfig = RankConfig()
    previous_end: ProcessEnd | None = None
    pass_record_fd: int | None = None

    @property
    def part(self) -> str:
        """The name of this part of the instance, which has a messenger of its own."""
        return self.rank.part_of(self.stage.part_of(self.instance))
