"""What the supervisor starts each process with: the configuration, and what only that process is.

Owns: these models, which travel on stdin. Does not know: how processes are started
(`mooncake.node.supervisor`).
"""

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
    """What a child is started with, on its stdin: arguments and environment can be read by others."""

    model_config = ConfigDict(hide_input_in_errors=True)

    cluster_key: Annotated[
        ClusterKey, PlainValidator(_as_key), PlainSerializer(ClusterKey.to_text, when_used="json")
    ]


class ConductorProcess(_Process):
    """What the conductor process is started with."""

    config: Config


class FrontProcess(_Process):
    """What a front in a process of its own is started with. `name` is not that of any other front's node;
    `incarnation` grows with every start.
    """

    config: Config
    name: str
    incarnation: int


class MessengerProcess(_Process):
    """What a messenger process is started with.

    `segment_fd` is inherited: allocated memory whose size is the pool's. The worker connects to
    `worker_socket`, messengers on the same host to `peer_socket`. KV events are published at the first of
    `event_endpoints`, replays and snapshots asked for at the second.
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


class StageProcess(Section):
    """Which stage of an instance a worker is. `endpoints`: where each stage but the last one listens."""

    number: int = 0
    num_stages: int = 1
    endpoints: list[str] = Field(default_factory=list)

    def part_of(self, instance: str) -> str:
        """The name of this part of an instance: what has a messenger of its own."""
        return instance if self.num_stages == 1 else f"{instance}.{self.number}"


class RankProcess(Section):
    """Which rank of a tensor-parallel instance a worker is. All are on one node.

    `endpoints`: where the first rank listens for each of the others. `meeting`: the beginning of the paths of
    files in which they meet to compute, one for each time that they do.
    """

    number: int = 0
    size: int = 1
    endpoints: list[str] = Field(default_factory=list)
    meeting: str = ""

    def part_of(self, instance: str) -> str:
        """As `StageProcess.part_of`."""
        return instance if self.size == 1 else f"{instance}.{self.number}"


PASS_RECORD_BYTES = 1 << 16


class WorkerProcess(_Process):
    """What a worker process is started with. `incarnation` grows with every start.

    `instance` names all stages or ranks together, `messenger_socket` is this one's own. `previous_end`: how
    the life before ended, None for the first one. `pass_record_fd` is inherited: `PASS_RECORD_BYTES` of
    memory that stays from life to life.
    """

    config: Config
    role: Role
    instance: str
    incarnation: int
    messenger_socket: str
    num_local_workers: int
    stage: StageProcess = StageProcess()
    rank: RankProcess = RankProcess()
    previous_end: ProcessEnd | None = None
    pass_record_fd: int | None = None

    @property
    def part(self) -> str:
        """The name of this part of the instance: what has a messenger of its own."""
        return self.rank.part_of(self.stage.part_of(self.instance))
