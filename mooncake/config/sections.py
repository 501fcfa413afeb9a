"""The sections of the configuration: keys with their types, bounds, defaults and meanings.

The sections of conductor and cluster have modules of their own (`mooncake.config.conductor_section`,
`mooncake.config.cluster_section`).

Owns: keys of the other sections, and conditions within one section. Does not know: files, flags, variables
(`mooncake.config.settings`), the users of a value.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, model_validator

from mooncake.config.policies import EvictionPolicy

LISTEN = r"^([^:/\[\]]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}$"
"""The pattern of host:port, or [address]:port of IPv6."""
ENDPOINT = r"^(tcp://([^:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5}|\*)|ipc://.+)$"
DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"
NAME = r"^[A-Za-z0-9._-]{1,64}$"
URL = r"^https?://([^:/\[\]@]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}$"
OTLP_URL = r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"
KEY_PREFIX = r"^(/[A-Za-z0-9._-]+)+$"
WORDS_OF_PATTERNS = {
    LISTEN: "host:port or [IPv6]:port",
    ENDPOINT: "tcp://host:port, tcp://[IPv6]:port or ipc://path",
    DEVICE: "auto, cpu, cuda or cuda:N",
    URL: "http://host:port or https://host:port",
    OTLP_URL: "http://host:port or https://host, maybe with a path",
    KEY_PREFIX: "a path such as /mooncake, without a slash at its end",
    NAME: "1 to 64 letters, digits, '.', '_' or '-'",
}
"""Texts for error messages that describe the patterns."""
ANY_ENDPOINT = "tcp://127.0.0.1:*"
LARGEST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=LARGEST_PORT)]
TransportChoice = Literal["auto", "shm", "rdma", "tcp"]
PositiveSeconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A section of keys. Unknown keys are errors, and values do not change after they have been checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def split_values(value: object) -> object:
    """Return the list of values in the comma-separated string of a flag or variable.

    Any other value is returned unchanged.
    """
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def _with_port(address: str) -> str:
    """Return `host:port` or a ZeroMQ endpoint unchanged. Raises ValueError if the port is invalid."""
    port = address.rpartition(":")[2]
    if not address.startswith("ipc://") and port.isdigit() and int(port) > LARGEST_PORT:
        raise ValueError(f"expected a port up to {LARGEST_PORT}")
    return address


Listen = Annotated[str, Field(pattern=LISTEN), AfterValidator(_with_port)]
Endpoint = Annotated[str, Field(pattern=ENDPOINT), AfterValidator(_with_port)]


class HttpConfig(Section):
    """The HTTP server of a front: the OpenAI-compatible API, and the pages for administrators."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(8000, description="port to listen on")
    max_request_bytes: ByteSize = Field(ByteSize(8 << 20), description="largest request body")
    tool_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template shows"
    )
    api_keys_file: Path | None = Field(
        None, description="clients need a key of this file (mooncake-serve apikey FILE NAME); default: none"
    )
    admin_listen: Listen | None = Field(
        None,
        description="host:port or [IPv6]:port of /metrics, /dashboard and /admin; default: beside the API",
    )
    admin_keys_file: Path | None = Field(
        None,
        description="/dashboard and /admin need a key of this file; with api_keys_file and without this they"
        " answer nobody",
    )
    context_cache_tokens: int = Field(
        1 << 17,
        ge=0,
        description="tokens that an API key may have in context caches, if its entry says nothing",
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM): the API is HTTPS")
    tls_key: Path | None = Field(None, description="the private key of tls_cert (PEM)")
    cors_origins: Annotated[list[str], BeforeValidator(split_values)] = Field(
        [], description="web pages of these origins may use the API, with commas; *: any"
    )

    @model_validator(mode="after")
    def _check_together(self) -> "HttpConfig":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("http.tls_cert and tls_key go together: name both or none")
        return self


class KVCacheConfig(Section):
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
    ssd_dirs: Annotated[list[Path], BeforeValidator(split_values)] = Field(
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
    listen: Listen | None = Field(
        None,
        description="host:port for clients of the pool on other hosts (instance i: port + i); off",
    )
    socket: Path | None = Field(
        None,
        description="Unix socket for clients of the pool on this host (instance i: -i behind it); default: in"
        " the run directory",
    )
    vllm_events: Endpoint | None = Field(
        None,
        description="publish KV events in vLLM's format at this ZeroMQ endpoint (instance i: port + i)",
    )
    vllm_replay: Endpoint | None = Field(
        None,
        description="answer replays of those events at this endpoint (instance i: port + i)",
    )

    vllm_topic: str = Field("", description="topic of those events; llm-d wants kv@ADDRESS@MODEL")

    @model_validator(mode="after")
    def _check_together(self) -> "KVCacheConfig":
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


class WorkerConfig(Section):
    """The computation of an instance: device, threads, prefill passes, decode batch."""

    device: str = Field("auto", pattern=DEVICE, description="auto, cpu, cuda or cuda:N")
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
        "auto",
        description="most tokens of one prefill pass (times the stages in a balanced pipeline);"
        " auto: 512 on CPUs, 2048 on GPUs",
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
    metrics_listen: Listen | None = Field(
        None,
        description="host:port of an instance's own /metrics and /ready (instance i: port + i); off",
    )
    modules_listen: Listen | None = Field(
        None,
        description="host:port at which this node's instances host layers and KV heads of instances on other"
        " hosts, which reach them at the first of messenger.hosts (instance i: port + i); off",
    )
    drain_timeout_s: PositiveSeconds = Field(
        30.0,
        description="how long a node that is told to end (SIGTERM) may finish what it runs: an instance its"
        " requests, a front its answers",
    )
    mixed_chunk_tokens: int = Field(
        256,
        ge=1,
        lt=2**31,
        description="most prompt tokens that a decode instance computes in an iteration with sequences that"
        " have no TBT SLO; with one the time that it leaves decides",
    )


class VllmConfig(Section):
    """The vLLM server of an instance, with `engine: vllm`."""

    command: str = Field(
        "vllm", min_length=1, description="the program vllm, in an environment with our connector"
    )
    options: Annotated[list[str], BeforeValidator(split_values)] = Field(
        [], description="further options of `vllm serve`, with commas"
    )


class PipelineConfig(Section):
    """Prefill instances whose layers are spread over several processes (chunked pipeline parallelism)."""

    stages: int = Field(
        1, ge=1, le=64, description="stages of a prefill instance, each with its own device and pool"
    )
    stage: int | None = Field(
        None, ge=0, description="the one to run here, from 0 on (--role prefill); default: all of them"
    )
    endpoints: Annotated[list[Annotated[str, Field(pattern=ENDPOINT)]], BeforeValidator(split_values)] = (
        Field(
            [],
            description="where each stage but the last is found by the next one (ZeroMQ), with commas;"
            " needed if stages are on several nodes",
        )
    )
    listen_endpoint: Endpoint | None = Field(
        None,
        description="where the stage of this node listens for the next one, if that is another one; default:"
        " its own of endpoints",
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
        if self.listen_endpoint is not None and self.stage in (None, self.stages - 1):
            raise ValueError(
                "pipeline.listen_endpoint is for a stage with another one behind it:"
                " name it in pipeline.stage"
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


class MessengerConfig(Section):
    """The data plane between instances."""

    hosts: Annotated[list[str], BeforeValidator(split_values)] = Field(
        ["127.0.0.1"],
        min_length=1,
        description="addresses at which others reach this node for KVCache transfers over TCP, with commas;"
        " several are used together",
    )
    listen_hosts: Annotated[list[str], BeforeValidator(split_values)] = Field(
        [],
        description="addresses to listen at for them: one, such as 0.0.0.0 or ::, or one for each of hosts;"
        " default: hosts",
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
    poll_us: float = Field(
        300.0,
        ge=0,
        le=10_000,
        description="microseconds that a messenger busy polls before it sleeps, if that has been of use; 0:"
        " never",
    )
    connect_timeout_s: PositiveSeconds = Field(5.0, description="deadline of a connection and its handshake")
    ack_timeout_s: PositiveSeconds = Field(30.0, description="deadline of a transfer's acknowledgement")
    arrival_timeout_s: PositiveSeconds = Field(
        60.0, description="how long after the end of prefill its KVCache may take to arrive"
    )

    @property
    def listens_at(self) -> list[str]:
        """The addresses at which the messenger's sockets listen."""
        return self.listen_hosts or self.hosts

    @model_validator(mode="after")
    def _check_listen(self) -> "MessengerConfig":
        if len(self.listen_hosts) not in (0, 1, len(self.hosts)):
            raise ValueError(
                f"messenger.listen_hosts names {len(self.listen_hosts)} addresses and messenger.hosts"
                f" {len(self.hosts)}: listen at one, or at one for each"
            )
        return self


class SecurityConfig(Section):
    """Keys and certificates of the cluster."""

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


class TracingConfig(Section):
    """Spans of requests, for an OpenTelemetry collector."""

    otlp_endpoint: Annotated[str, Field(pattern=OTLP_URL)] | None = Field(
        None,
        description="http://host:4318 of a collector: spans of requests go to it by OTLP over HTTP, at"
        " /v1/traces behind the URL; default: no spans",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests that are traced; with a traceparent header the client has decided",
    )
