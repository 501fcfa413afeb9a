"""Configuration: one typed model, read once from YAML, environment and flags (later wins).

Owns: keys, types, defaults, and the errors that name them. Does not know: who uses a value.
"""

import difflib
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from mooncake.errors import ConfigError
from mooncake.keys import ClusterKey
from mooncake.messages import Role

ENV_PREFIX = "MOONCAKE_"
# Kubernetes gives every container the addresses of its services; one may be called mooncake.
KUBERNETES_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?=|_PORT=\w+://|_PORT_\d+_(TCP|UDP)(_\w+)?=")
MERGE_TAG = "tag:yaml.org,2002:merge"  # `<<`, which may stand more than once
LISTEN = r"^([^:/\[\]]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}$"
"""host:port, or [address]:port of IPv6"""
ENDPOINT = r"^(tcp://[^:/]+:(\d{1,5}|\*)|ipc://.+)$"
ANY_ENDPOINT = "tcp://127.0.0.1:*"
RESERVED_ENV = frozenset({"MOONCAKE_STATUS_FD"})
LARGEST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=LARGEST_PORT)]
TransportChoice = Literal["auto", "shm", "rdma", "tcp"]
PositiveSeconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _split(value: object) -> object:
    """A flag or variable has one string for several values."""
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def _check_port(key: str, address: str | None) -> None:
    """Of `host:port`, or a ZeroMQ endpoint. Raises ValueError if there is no such port."""
    port = (address or "").rpartition(":")[2]
    if not (address or "").startswith("ipc://") and port.isdigit() and int(port) > LARGEST_PORT:
        raise ValueError(f"{key}: {address} has no port up to {LARGEST_PORT}")


class HttpConfig(_Section):
    """The OpenAI-compatible API."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(8000, description="port to listen on")
    max_request_bytes: ByteSize = Field(ByteSize(8 << 20), description="largest request body")
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template shows"
    )
    api_keys_file: Path | None = Field(
        None, description="clients need a key of this file (mooncake-serve apikey FILE NAME); default: none"
    )
    admin_listen: str | None = Field(
        None,
        pattern=LISTEN,
        description="host:port or [IPv6]:port of /metrics, /dashboard and /admin; default: beside the API",
    )
    admin_keys_file: Path | None = Field(
        None, description="/dashboard and /admin at admin_listen need a key of this file; default: none"
    )
    context_cache_tokens: int = Field(
        1 << 17,
        ge=0,
        description="tokens that an API key may have in context caches, if its entry says nothing",
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM): the API is HTTPS")
    tls_key: Path | None = Field(None, description="the private key of tls_cert (PEM)")
    cors_origins: Annotated[list[str], BeforeValidator(_split)] = Field(
        [], description="web pages of these origins may use the API, with commas; *: any"
    )

    @model_validator(mode="after")
    def _check_together(self) -> "HttpConfig":
        _check_port("http.admin_listen", self.admin_listen)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("http.tls_cert and tls_key go together: name both or none")
        if self.admin_keys_file is not None and self.admin_listen is None:
            raise ValueError("http.admin_keys_file is for http.admin_listen: name that too")
        return self


class EvictionPolicy(StrEnum):
    """Which block goes first when room is needed (Mooncake, Table 1)."""

    LRU = "lru"
    LFU = "lfu"
    LENGTH_AWARE = "length_aware"


class Scheduling(StrEnum):
    """How the Conductor chooses a prefill instance (Mooncake, section 6; BanaServe, Algorithm 2)."""

    KVCACHE_CENTRIC = "kvcache_centric"
    CACHE_AWARE = "cache_aware"
    LOAD_BALANCING = "load_balancing"
    RANDOM = "random"
    BANASERVE = "banaserve"


class Overload(StrEnum):
    """What decides whether a request is rejected (Mooncake, section 7)."""

    BASELINE = "baseline"
    EARLY_REJECTION = "early_rejection"
    PREDICTION = "prediction"
    REQUEST_PREDICTION = "request_prediction"


class KVCacheConfig(_Section):
    """Blocks, and the memory and disks that each instance gives to them."""

    block_size: int = Field(32, ge=1, le=4096, description="tokens of a block; equal in the whole cluster")
    pool_bytes: ByteSize = Field(ByteSize(1 << 30), description="DRAM of an instance's part of the pool")
    device_bytes: ByteSize = Field(ByteSize(1 << 30), description="device memory for KVCache of an instance")
    segment_dir: Path | None = Field(
        None, description="keep the DRAM part in a file here (tmpfs, hugetlbfs): it outlives the processes"
    )
    eviction: EvictionPolicy = Field(
        EvictionPolicy.LRU, description="which block goes first: lru, lfu or length_aware"
    )
    low_watermark: float = Field(0.02, ge=0, lt=1, description="share of free pages below which room is made")
    high_watermark: float = Field(0.05, ge=0, lt=1, description="share of free pages up to which it is made")
    ssd_dirs: Annotated[list[Path], BeforeValidator(_split)] = Field(
        [], description="directories of the SSD tier, one a disk, comma-separated; none: no such tier"
    )
    ssd_bytes: ByteSize = Field(
        ByteSize(16 << 30), description="size of an instance's slab in each of ssd_dirs"
    )
    ssd_depth: int = Field(8, ge=1, le=256, description="blocks read or written at the same time, a disk")
    ssd_timeout_s: PositiveSeconds = Field(
        2.0,
        le=4,
        description="a disk that takes longer is left alone for a while, what was asked of it recomputed",
    )
    listen: str | None = Field(
        None,
        pattern=r"^[^:/]+:\d{1,5}$",
        description="host:port for clients of the pool on other hosts (instance i: port + i); off",
    )
    vllm_events: str | None = Field(
        None,
        pattern=ENDPOINT,
        description="publish KV events in vLLM's format at this ZeroMQ endpoint (instance i: port + i)",
    )
    vllm_replay: str | None = Field(
        None,
        pattern=ENDPOINT,
        description="answer replays of those events at this endpoint (instance i: port + i)",
    )

    vllm_topic: str = Field("", description="topic of those events; llm-d wants kv@ADDRESS@MODEL")

    @model_validator(mode="after")
    def _check_together(self) -> "KVCacheConfig":
        _check_port("kvcache.listen", self.listen)
        _check_port("kvcache.vllm_events", self.vllm_events)
        _check_port("kvcache.vllm_replay", self.vllm_replay)
        if len({path.resolve() for path in self.ssd_dirs}) < len(self.ssd_dirs):
            raise ValueError("kvcache.ssd_dirs: a directory is named twice")
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"kvcache.low_watermark {self.low_watermark} is above kvcache.high_watermark"
                f" {self.high_watermark}; raise the second or lower the first"
            )
        if self.vllm_replay is not None and self.vllm_events is None:
            raise ValueError("kvcache.vllm_replay has no effect without vllm_events")
        return self


class SLOClass(_Section):
    """What requests of one class are promised, and before whom they go."""

    ttft_slo_s: PositiveSeconds | None = None
    tbt_slo_s: PositiveSeconds | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0


def _from_json(value: object) -> object:
    """A flag or variable has JSON for what is a mapping in YAML."""
    return json.loads(value) if isinstance(value, str) else value


SLOClassName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class ConductorConfig(_Section):
    """The conductor's listeners and limits."""

    endpoint: str = Field(
        "tcp://127.0.0.1:7800", pattern=ENDPOINT, description="where workers find the conductor (ZeroMQ)"
    )
    reply_endpoint: str = Field(
        "tcp://127.0.0.1:7801", pattern=ENDPOINT, description="where workers send tokens to (ZeroMQ)"
    )
    max_running_requests: int = Field(256, ge=1, description="requests beyond it get HTTP 429")
    ttft_slo_s: PositiveSeconds | None = Field(
        None, description="when a first token is due: prefill takes prompts in this order; default: arrival"
    )
    tbt_slo_s: PositiveSeconds | None = Field(
        None, description="how long a token may take: decode instances refuse requests beyond; default: any"
    )
    slo_classes: Annotated[dict[SLOClassName, SLOClass], BeforeValidator(_from_json)] = Field(
        {},
        description="what clients may name in X-Mooncake-SLO-Class: ttft_slo_s, tbt_slo_s and priority (lower"
        " goes first) of each",
    )
    max_waiting: int = Field(
        0,
        ge=0,
        description="requests that wait for decode's load to fall while their TTFT SLO allows it, instead of"
        " HTTP 429 at once",
    )
    scheduling: Scheduling = Field(
        Scheduling.KVCACHE_CENTRIC,
        description="how prefill instances are chosen: kvcache_centric, or its rivals cache_aware,"
        " load_balancing, random, banaserve",
    )
    kvcache_balancing_threshold: Annotated[float, Field(ge=1)] | Literal["auto"] = Field(
        1.25,
        description="fetch a prefix from another instance if it is so many times as long as the own one;"
        " auto: adapts, so that copies do not drive out blocks that are wanted again",
    )
    replicate: bool = Field(
        True,
        description="copy the hottest prefixes to more prefill instances before they are asked for, and drop"
        " such copies again; only if scheduling fetches prefixes",
    )
    replication_period_s: PositiveSeconds = Field(5.0, description="how often that is looked at")
    replication_uses: float = Field(
        20.0,
        gt=0,
        description="a prefix is worth one copy more for every so many uses; one counts half after a minute",
    )
    replication_bytes: ByteSize = Field(
        ByteSize(256 << 20), description="of copies that are under way, and that are ordered in one period"
    )
    overload: Overload = Field(
        Overload.PREDICTION,
        description="what rejects requests that would miss ttft_slo_s or tbt_slo_s: baseline,"
        " early_rejection, prediction or request_prediction",
    )
    profile: Path | None = Field(
        None, description="costs of prefill and decode (mooncake-serve profile FILE); default: learned"
    )
    peer_timeout_s: float = Field(5.0, ge=3.0, description="silence after which a peer counts as dead")
    placement_timeout_s: PositiveSeconds = Field(
        60.0, description="how long a request waits for a lost instance to come back"
    )

    @model_validator(mode="after")
    def _check_endpoints(self) -> "ConductorConfig":
        _check_port("conductor.endpoint", self.endpoint)
        _check_port("conductor.reply_endpoint", self.reply_endpoint)
        return self


class WorkerConfig(_Section):
    """How an instance computes."""

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks of an instance, each with some KV heads and its own device and pool",
    )
    num_threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="CPU threads of a worker; auto: one for each core, all but one on idle cores only"
    )
    prefill_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="most tokens of one prefill pass; auto: 512 on CPUs, 2048 on GPUs"
    )
    layerwise_overlap: bool = Field(
        True, description="load and store KVCache beside the computation, layer by layer"
    )
    prefill_layer_window: Annotated[int, Field(ge=2)] | Literal["all"] = Field(
        "all",
        description="layers that device_bytes of a prefill instance hold at a time; fewer: longer prompts"
        " fit, whose passes load again what stands before them",
    )
    max_batch: int = Field(32, ge=1, description="most requests decoded together")
    metrics_listen: str | None = Field(
        None,
        pattern=r"^[^:/]+:\d{1,5}$",
        description="host:port of an instance's own /metrics and /ready (instance i: port + i); off",
    )
    drain_timeout_s: PositiveSeconds = Field(
        30.0, description="how long an instance that is told to end (SIGTERM) may finish what it runs"
    )
    inline_prefill_tokens: int = Field(
        0,
        ge=0,
        description="decode instances compute a prompt themselves if no more of its tokens lack KVCache",
    )

    @model_validator(mode="after")
    def _check_metrics_listen(self) -> "WorkerConfig":
        _check_port("worker.metrics_listen", self.metrics_listen)
        return self


class PipelineConfig(_Section):
    """Prefill instances whose layers are spread over several processes (chunked pipeline parallelism)."""

    stages: int = Field(
        1, ge=1, le=64, description="stages of a prefill instance, each with its own device and pool"
    )
    stage: int | None = Field(
        None, ge=0, description="the one to run here, from 0 on (--role prefill); default: all of them"
    )
    endpoints: Annotated[list[Annotated[str, Field(pattern=ENDPOINT)]], BeforeValidator(_split)] = Field(
        [],
        description="where each stage but the last listens for the next one (ZeroMQ), with commas;"
        " needed if stages are on several nodes",
    )
    chunks: Literal["balanced", "fixed"] = Field(
        "balanced",
        description="balanced: chunks of a prompt shrink as its prefix grows; fixed: prefill_chunk tokens",
    )

    @model_validator(mode="after")
    def _check_together(self) -> "PipelineConfig":
        if self.stage is not None and self.stage >= self.stages:
            raise ValueError(f"pipeline.stage {self.stage} is none of the {self.stages} of pipeline.stages")
        if self.stage is not None and self.stages == 1:
            raise ValueError(
                "pipeline.stage needs pipeline.stages of 2 or more: an instance of one has no parts"
            )
        if self.stage is not None and not self.endpoints:
            raise ValueError(
                "pipeline.stage needs pipeline.endpoints: where the stages on other nodes find each other"
            )
        if self.endpoints and len(self.endpoints) != self.stages - 1:
            raise ValueError(
                f"pipeline.endpoints names {len(self.endpoints)} endpoints;"
                f" {self.stages} stages need {self.stages - 1}, one for each but the last"
            )
        for endpoint in self.endpoints:
            place, _, port = endpoint.rpartition(":")
            if place.startswith("tcp://") and not (port.isdigit() and 1 <= int(port) <= LARGEST_PORT):
                raise ValueError(
                    f"pipeline.endpoints: {endpoint} needs a port from 1 to {LARGEST_PORT},"
                    " at which the next stage finds it"
                )
            if self.endpoints.count(endpoint) > 1:
                raise ValueError(f"pipeline.endpoints names {endpoint} twice: each stage listens at its own")
        return self


class MessengerConfig(_Section):
    """The data plane between instances."""

    hosts: Annotated[list[str], BeforeValidator(_split)] = Field(
        ["127.0.0.1"],
        min_length=1,
        description="addresses for KVCache transfers over TCP, with commas; several are used together",
    )
    port: Port = Field(
        0, description="port for KVCache transfers over TCP, one more for each further instance; 0: free ones"
    )
    topology: str | None = Field(
        None,
        description="which RDMA devices are near which memory, as JSON; default: what sysfs says",
    )
    rdma_gid_index: int | None = Field(None, ge=0, description="address of the RDMA ports; default: found")
    streams: int = Field(2, ge=1, le=16, description="connections to each address of another messenger")
    max_sessions: int = Field(
        1024, ge=1, description="other messengers to stay connected to; idle ones are given up beyond"
    )
    transport: TransportChoice = Field(
        "auto", description="auto: shm on one host, else rdma if both sides have it, else tcp"
    )
    connect_timeout_s: PositiveSeconds = Field(5.0, description="deadline of a connection and its handshake")
    ack_timeout_s: PositiveSeconds = Field(30.0, description="deadline of a transfer's acknowledgement")
    arrival_timeout_s: PositiveSeconds = Field(
        60.0, description="how long after the end of prefill its KVCache may take to arrive"
    )


class SecurityConfig(_Section):
    """Who may speak to the processes of the cluster."""

    key_file: Path | None = Field(
        None,
        description="the cluster's key, the same on all nodes (mooncake-serve keygen FILE);"
        " --role all makes one for the run",
    )
    tls_cert: Path | None = Field(
        None, description="this node's certificate (PEM): KVCache transfers over TCP are encrypted with it"
    )
    tls_key: Path | None = Field(None, description="the private key of tls_cert (PEM)")
    tls_ca: Path | None = Field(None, description="who signs the certificates of all nodes (PEM)")

    @model_validator(mode="after")
    def _check_pairs(self) -> "SecurityConfig":
        given = [self.tls_cert, self.tls_key, self.tls_ca]
        if None in given and given != [None] * 3:
            raise ValueError("security.tls_cert, tls_key and tls_ca go together: name all of them or none")
        return self


class Config(_Section):
    """Everything that `mooncake-serve` can be told."""

    role: Literal["all", "conductor", "prefill", "decode"] = Field("all", description="what to run here")
    model: str | None = Field(
        None, description="Hugging Face directory, .gguf file or hub id; default: SmolLM2-135M-Instruct"
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="arithmetic; auto: the checkpoint's own"
    )
    served_model_name: str | None = Field(None, min_length=1, description="the name that clients ask for")
    instance: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._-]{1,64}$", description="name of this instance (--role prefill, decode)"
    )
    num_prefill: int = Field(1, ge=1, description="prefill instances (--role all)")
    num_decode: int = Field(1, ge=1, description="decode instances (--role all)")
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="what is logged")
    hang_timeout_s: Annotated[float, Field(ge=5.0)] | Literal["never"] = Field(
        30.0,
        description="a process that gives no sign of life for so long is ended and started again; never: for"
        " debuggers",
    )
    http: HttpConfig = Field(default_factory=HttpConfig)
    kvcache: KVCacheConfig = Field(default_factory=KVCacheConfig)
    conductor: ConductorConfig = Field(default_factory=ConductorConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    messenger: MessengerConfig = Field(default_factory=MessengerConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)

    @model_validator(mode="after")
    def _check_role(self) -> "Config":
        """A key that has no effect with this role is a mistake, not a wish to be ignored."""
        if self.role != "all" and (self.num_prefill, self.num_decode) != (1, 1):
            raise ValueError(f"num_prefill and num_decode need role all, not {self.role}")
        if self.role in ("all", "conductor") and self.instance is not None:
            raise ValueError(f"instance names one prefill or decode instance, not role {self.role}")
        if self.role in ("decode", "conductor") and self.pipeline.stages > 1:
            raise ValueError(f"pipeline.stages is for prefill instances, not role {self.role}")
        if self.role == "all" and (self.pipeline.stage is not None or self.pipeline.endpoints):
            raise ValueError(
                "pipeline.stage and pipeline.endpoints need role prefill: role all runs all stages"
            )
        if self.pipeline.stage is not None and self.instance is None:
            raise ValueError("pipeline.stage is a part of an instance: name it, the same in all its stages")
        if self.pipeline.stages > 1 and self.worker.tensor_parallel > 1:
            raise ValueError(
                f"pipeline.stages {self.pipeline.stages} and worker.tensor_parallel"
                f" {self.worker.tensor_parallel} do not go together: a stage is one process; leave one at 1"
            )
        keeps = next((key for key in ("ssd_dirs", "segment_dir") if getattr(self.kvcache, key)), None)
        if self.role in ("prefill", "decode") and keeps is not None and self.instance is None:
            raise ValueError(
                f"kvcache.{keeps} keeps files by the name of the instance: give it one (--instance NAME)"
            )
        return self


def _as_key(value: object) -> ClusterKey:
    return value if isinstance(value, ClusterKey) else ClusterKey.from_text(str(value))


class _Process(_Section):
    """What a child is started with, on its stdin: arguments and environment can be read by others."""

    model_config = ConfigDict(hide_input_in_errors=True)

    cluster_key: Annotated[
        ClusterKey, PlainValidator(_as_key), PlainSerializer(ClusterKey.to_text, when_used="json")
    ]


class ConductorProcess(_Process):
    """What the conductor process is started with."""

    config: Config


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


class StageProcess(_Section):
    """Which stage of an instance a worker is. `endpoints`: where each stage but the last one listens."""

    number: int = 0
    num_stages: int = 1
    endpoints: list[str] = []

    def part_of(self, instance: str) -> str:
        """The name of this part of an instance: what has a messenger of its own."""
        return instance if self.num_stages == 1 else f"{instance}.{self.number}"


class RankProcess(_Section):
    """Which rank of a tensor-parallel instance a worker is. All are on one node.

    `endpoints`: where the first rank listens for each of the others. `meeting`: the beginning of the paths of
    files in which they meet to compute, one for each time that they do.
    """

    number: int = 0
    size: int = 1
    endpoints: list[str] = []
    meeting: str = ""

    def part_of(self, instance: str) -> str:
        """As `StageProcess.part_of`."""
        return instance if self.size == 1 else f"{instance}.{self.number}"


class WorkerProcess(_Process):
    """What a worker process is started with. `incarnation` grows with every start.

    `instance` names all stages or ranks together, `messenger_socket` is this one's own.
    """

    config: Config
    role: Role
    instance: str
    incarnation: int
    messenger_socket: str
    num_local_workers: int
    stage: StageProcess = StageProcess()
    rank: RankProcess = RankProcess()

    @property
    def part(self) -> str:
        """The name of this part of the instance: what has a messenger of its own."""
        return self.rank.part_of(self.stage.part_of(self.instance))


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`; an IPv6 address comes without its brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def leaf_keys(model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all keys that hold a value, in order of declaration: `("http", "port")`."""
    keys: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys += leaf_keys(annotation, (*prefix, name))
        else:
            keys.append((*prefix, name))
    return keys


def describe(path: tuple[str, ...]) -> str:
    """What a key means, its choices and its default."""
    model: Any = Config
    for name in path[:-1]:
        model = model.model_fields[name].annotation
    field = model.model_fields[path[-1]]
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    text = f"{field.description}; one of {', '.join(choices)}" if choices else str(field.description)
    default = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
    return text if default is None else f"{text} (default: {default})"


def env_name(path: tuple[str, ...]) -> str:
    """The environment variable of a key: `MOONCAKE_HTTP_PORT`."""
    return ENV_PREFIX + "_".join(path).upper()


def load_config(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[tuple[str, ...], str]
) -> Config:
    """Merge YAML < environment < flags and validate. Raises `ConfigError` naming key and source."""
    origins: dict[tuple[str, ...], str] = {}
    merged: dict[str, Any] = _read_yaml(file) if file is not None else {}
    by_variable = {env_name(path): path for path in leaf_keys()}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in RESERVED_ENV:
            continue
        if variable not in by_variable:
            if KUBERNETES_SERVICE.search(f"{variable}={value}"):
                continue
            near = difflib.get_close_matches(variable, by_variable, n=3, cutoff=0.0)
            raise ConfigError(
                f"{variable}: unknown variable; near ones are {', '.join(near)} (--help lists all keys)"
            )
        _put(merged, by_variable[variable], value)
        origins[by_variable[variable]] = variable
    for path, value in flags.items():
        _put(merged, path, value)
        origins[path] = "--" + "-".join(path).replace("_", "-")
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, file)) from None


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, of which PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value if key.tag != MERGE_TAG]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected keys and values, found {type(content).__name__}")
    sections = {path[0] for path in leaf_keys() if len(path) > 1}
    return {key: {} if key in sections and value is None else value for key, value in content.items()}


def _put(tree: dict[str, Any], path: tuple[str, ...], value: str) -> None:
    for name in path[:-1]:
        branch = tree.setdefault(name, {})
        if not isinstance(branch, dict):
            return  # the file has a scalar where a section belongs; validation names it
        tree = branch
    tree[path[-1]] = value


def _explain(error: ValidationError, origins: Mapping[tuple[str, ...], str], file: Path | None) -> str:
    lines = []
    for problem in error.errors():
        path = tuple(
            str(part) for part in problem["loc"] if not str(part).startswith(("literal[", "constrained"))
        )
        path = next((key for key in leaf_keys() if path[: len(key)] == key), path)
        origin = origins.get(path, str(file) if file is not None else "default")
        if problem["type"] == "value_error":  # keys that do not go together, named in the message
            lines.append(problem["msg"].removeprefix("Value error, "))
        elif problem["type"] == "model_type":
            lines.append(f"{'.'.join(path)}: expected keys and values, found {problem['input']!r} ({origin})")
        elif problem["type"] == "extra_forbidden":
            section = path[:-1]
            known = sorted({key[len(section)] for key in leaf_keys() if key[: len(section)] == section})
            lines.append(f"{'.'.join(path)}: unknown key ({origin}); known keys here are {', '.join(known)}")
        else:
            lines.append(f"{'.'.join(path)}: {problem['msg']}, found {problem['input']!r} ({origin})")
    return "; ".join(dict.fromkeys(lines))
