"""Configuration: one typed model, read once from YAML, environment and flags (later wins).

Owns: the keys of a node, sources and their order, errors that name keys. Does not know: the sections' keys
(`mooncake.config.sections`), the users of a value.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ByteSize, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mooncake.config.cluster_section import ClusterConfig
from mooncake.config.conductor_section import ConductorConfig
from mooncake.config.sections import (
    NAME,
    WORDS_OF_PATTERNS,
    HttpConfig,
    KVCacheConfig,
    MessengerConfig,
    PipelineConfig,
    Section,
    SecurityConfig,
    TracingConfig,
    VllmConfig,
    WorkerConfig,
)
from mooncake.config.spelling import did_you_mean
from mooncake.endpoints import is_any_address
from mooncake.errors import ConfigError
from mooncake.messages.workers import Role
from mooncake.yaml_errors import what_is_wrong

ENV_PREFIX = "MOONCAKE_"
# Kubernetes gives every container the addresses of its services; one may be called mooncake.
KUBERNETES_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?=|_PORT=\w+://|_PORT_\d+_(TCP|UDP)(_\w+)?=")
_LISTENED_AT = {
    "conductor.endpoint": "conductor.listen_endpoint",
    "conductor.reply_endpoint": "conductor.reply_listen_endpoint",
    "messenger.hosts": "messenger.listen_hosts",
    "pipeline.endpoints": "pipeline.listen_endpoint",
}
"""The keys of listening addresses, by the keys of the addresses that other nodes are told."""
MERGE_TAG = "tag:yaml.org,2002:merge"  # `<<`, which may stand more than once
RESERVED_ENV = frozenset({"MOONCAKE_STATUS_FD", "MOONCAKE_CPU_KERNELS"})
"""Environment variables that are no keys.

A supervisor sets one for its children, the CPU's kernels read the other.
"""


class Config(Section):
    """The whole configuration of `mooncake-serve`."""

    role: Literal["all", "conductor", "prefill", "decode", "both", "front", "pool"] = Field(
        "all", description="what to run here"
    )
    model: str | None = Field(
        None, description="Hugging Face directory, .gguf file or hub id; default: SmolLM2-135M-Instruct"
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="arithmetic; auto: the checkpoint's own"
    )
    served_model_name: str | None = Field(None, min_length=1, description="the name that clients ask for")
    engine: Literal["own", "vllm"] = Field(
        "own", description="what computes on instances: workers of ours, or a vLLM server of each"
    )
    instance: str | None = Field(
        None, pattern=NAME, description="name of this instance (--role prefill, decode, both, pool)"
    )
    num_prefill: int | None = Field(
        None,
        ge=0,
        description="prefill instances (--role all); default: 1 if no instance does both, else none",
    )
    num_decode: int | None = Field(
        None,
        ge=0,
        description="decode instances (--role all); default: 1 if no instance does both, else none",
    )
    num_both: int | None = Field(
        None,
        ge=0,
        description="instances that decode and compute their own prompts (--role all); default: 1, but none"
        " beside num_prefill, num_decode, pipeline.stages or worker.prefill_layer_window",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="what is logged")
    hang_timeout_s: Annotated[float, Field(ge=5.0)] | Literal["never"] = Field(
        30.0,
        description="a process that gives no sign of life for so long is ended and started again; never: for"
        " debuggers",
    )
    http: HttpConfig = Field(default_factory=HttpConfig)
    kvcache: KVCacheConfig = Field(default_factory=KVCacheConfig)
    conductor: ConductorConfig = Field(default_factory=ConductorConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    messenger: MessengerConfig = Field(default_factory=MessengerConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)

    @property
    def has_api(self) -> bool:
        """Whether this node runs a front."""
        return self.role in ("all", "conductor", "front")

    @property
    def is_alone(self) -> bool:
        """Whether this node is a cluster of its own, without nodes with which to share a cluster key."""
        return self.role in ("all", "pool")

    @property
    def cluster_address(self) -> str:
        """The address that all nodes of this cluster share, and no other cluster has.

        It is etcd's with the prefix, or the Conductor's.
        """
        if self.cluster.has_standbys:
            return ",".join(sorted(self.cluster.etcd_endpoints)) + self.cluster.etcd_prefix
        return self.conductor.endpoint

    @property
    def has_pool(self) -> bool:
        """Whether this node runs messengers."""
        return self.role not in ("conductor", "front")

    @property
    def runs_instances(self) -> bool:
        """Whether this node runs messengers and workers."""
        return self.has_pool and self.role != "pool"

    @property
    def runs_one_instance(self) -> bool:
        """Whether this node runs one instance, or a part of one."""
        return self.role in ("prefill", "decode", "both")

    @property
    def num_instances(self) -> dict[Role, int]:
        """The number of instances of each role that this node runs, wholly or in part.

        By default role all is one instance with both roles. It is one prefill and one decode instance if the
        number of one of these is given, or a key that only prefill instances have.
        """
        if self.role != "all":
            return {Role(self.role): 1} if self.runs_one_instance else {}
        num_both = self.num_both
        if num_both is None:
            has_numbers = (self.num_prefill, self.num_decode) != (None, None)
            is_for_prefill = self.pipeline.stages > 1 or self.worker.prefill_layer_window != "all"
            num_both = 0 if has_numbers or is_for_prefill else 1
        least = 0 if num_both else 1
        num_prefill = least if self.num_prefill is None else self.num_prefill
        num_decode = least if self.num_decode is None else self.num_decode
        return {Role.PREFILL: num_prefill, Role.DECODE: num_decode, Role.BOTH: num_both}

    @model_validator(mode="after")
    def _check_role(self) -> "Config":
        """Refuse keys that have no effect with this role, and keys that do not go together."""
        if self.role != "all" and (self.num_prefill, self.num_decode, self.num_both) != (None, None, None):
            raise ValueError(f"num_prefill, num_decode and num_both need role all, not {self.role}")
        if self.role == "all":
            num = self.num_instances
            if not num[Role.BOTH] and not (num[Role.PREFILL] and num[Role.DECODE]):
                raise ValueError("a cluster needs num_prefill and num_decode of at least 1 each, or num_both")
        if self.is_alone and self.cluster.has_standbys:
            raise ValueError(f"cluster.etcd_endpoints is for nodes of their own, not role {self.role}")
        if self.has_api and self.instance is not None:
            raise ValueError(f"instance names one instance of a node of its own, not role {self.role}")
        if self.role not in ("all", "prefill") and self.pipeline.stages > 1:
            raise ValueError(f"pipeline.stages is for prefill instances, not role {self.role}")
        if self.role == "all" and self.pipeline.stages > 1 and not self.num_instances[Role.PREFILL]:
            raise ValueError(
                "pipeline.stages is for prefill instances, and there are none: give num_prefill a number"
            )
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
        if self.engine == "vllm" and (self.pipeline.stages > 1 or self.worker.tensor_parallel > 1):
            raise ValueError(
                "engine vllm holds whole blocks: leave pipeline.stages and worker.tensor_parallel at 1"
            )
        keeps = next((key for key in ("ssd_dirs", "segment_dir") if getattr(self.kvcache, key)), None)
        if self.has_pool and not self.has_api and keeps is not None and self.instance is None:
            raise ValueError(
                f"kvcache.{keeps} keeps files by the name of the instance: give it one (--instance NAME)"
            )
        return self

    @model_validator(mode="after")
    def _check_told(self) -> "Config":
        """Refuse addresses such as 0.0.0.0 where other nodes are told how to reach this node.

        They stand for all addresses of a machine.
        """
        if self.role == "all":
            return self
        conductor = self.conductor
        told = [("conductor.endpoint", conductor.endpoint, _host_of(conductor.endpoint))]
        if self.has_api:
            told.append(
                ("conductor.reply_endpoint", conductor.reply_endpoint, _host_of(conductor.reply_endpoint))
            )
        if self.has_pool:
            told += [("messenger.hosts", host, host) for host in self.messenger.hosts]
        told += [("pipeline.endpoints", endpoint, _host_of(endpoint)) for endpoint in self.pipeline.endpoints]
        for key, address, host in told:
            if is_any_address(host):
                raise ValueError(
                    f"{key} {address} is what other nodes are told: name an address at which they reach this"
                    f" one; {_LISTENED_AT[key]} may be {address}"
                )
        return self


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`; an IPv6 address without its brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _host_of(endpoint: str) -> str:
    """Return the host of a ZeroMQ endpoint, an IPv6 address without its brackets."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")


def leaf_keys(model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all keys that hold a value, in order of declaration: `("http", "port")`."""
    keys: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys += leaf_keys(annotation, (*prefix, name))
        else:
            keys.append((*prefix, name))
    return keys


def section_of(path: tuple[str, ...]) -> tuple[str, str]:
    """Return the name and the description of a key's section; keys that stand alone are in `general`."""
    if len(path) == 1:
        return "general", "What runs here."
    section: Any = Config.model_fields[path[0]].annotation
    return path[0], section.__doc__


def field_of(path: tuple[str, ...]) -> FieldInfo:
    """Return the declaration of a key."""
    model: Any = Config
    for name in path[:-1]:
        model = model.model_fields[name].annotation
    field: FieldInfo = model.model_fields[path[-1]]
    return field


def describe(path: tuple[str, ...]) -> str:
    """Return a key's meaning, its choices and its default."""
    field = field_of(path)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    text = f"{field.description}; one of {', '.join(choices)}" if choices else str(field.description)
    default = default_of(field)
    return f"{text} (default: {default})" if default else text


def default_of(field: FieldInfo) -> str:
    """Return a key's default as the command line would have it; empty if there is none."""
    match field.default:
        case None:
            return ""
        case ByteSize() as size:
            return size.human_readable()
        case bool() as value:
            return str(value).lower()
        case list() as values:
            return ",".join(map(str, values))
        case dict():
            return ""
    return str(field.default)


def env_name(path: tuple[str, ...]) -> str:
    """Return the environment variable of a key: `MOONCAKE_HTTP_PORT`."""
    return ENV_PREFIX + "_".join(path).upper()


def flag_name(path: tuple[str, ...]) -> str:
    """Return the flag of a key: `--http-port`."""
    return "--" + "-".join(path).replace("_", "-")


def load_config(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[tuple[str, ...], str]
) -> Config:
    """Return the validated configuration, merged from YAML < environment < flags.

    Raises `ConfigError` that names key and source.
    """
    origins: dict[tuple[str, ...], str] = {}
    merged: dict[str, Any] = _read_yaml(file) if file is not None else {}
    by_variable = {env_name(path): path for path in leaf_keys()}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in RESERVED_ENV:
            continue
        if variable not in by_variable:
            if KUBERNETES_SERVICE.search(f"{variable}={value}"):
                continue
            meant = did_you_mean(variable, by_variable)
            raise ConfigError(f"{variable}: unknown variable{meant} (--help-all lists all keys)")
        _put(merged, by_variable[variable], value)
        origins[by_variable[variable]] = variable
    for path, value in flags.items():
        _put(merged, path, value)
        origins[path] = flag_name(path)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, file)) from None


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a repeated key, of which PyYAML would silently keep the last."""

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
        raise ConfigError(f"{file} is not valid YAML: {what_is_wrong(error)}") from None
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
    lines: dict[tuple[str, str], list[str]] = {}
    """Expected kinds of a value, by the texts before and behind them."""
    for problem in error.errors():
        path = tuple(
            str(part) for part in problem["loc"] if not str(part).startswith(("literal[", "constrained"))
        )
        place = ".".join(path)
        key = next((key for key in leaf_keys() if path[: len(key)] == key), None)
        origin = origins.get(key or path, str(file) if file is not None else "default")
        if problem["type"] == "value_error" and key is None:  # keys that do not go together: it names them
            lines[_expected(problem), ""] = []
        elif problem["type"] == "extra_forbidden":
            lines[f"{place}: unknown key ({origin})", _known_beside(path, key)] = []
        else:
            kinds = lines.setdefault((f"{place}: ", f", found {problem['input']!r} ({origin})"), [])
            kinds.append(_expected(problem))
    return "; ".join(
        before + ", or ".join(dict.fromkeys(kinds)) + behind for (before, behind), kinds in lines.items()
    )


def _expected(problem: ErrorDetails) -> str:
    if problem["type"] == "model_type":
        return "expected keys and values"
    if problem["type"] == "string_pattern_mismatch":
        return f"expected {WORDS_OF_PATTERNS[problem['ctx']['pattern']]}"
    return problem["msg"].removeprefix("Value error, ")


def _known_beside(path: tuple[str, ...], key: tuple[str, ...] | None) -> str:
    """Return a text with the nearest known key, and with all known keys of the section.

    The text is empty for an unknown name within the value of `key`.
    """
    if key is not None:
        return ""
    dotted = tuple(path[0].split("."))
    if len(path) == 1 and dotted in leaf_keys():
        return f"; in a file its section stands around it, as in {dotted[0]}: {{{dotted[1]}: ...}}"
    section = path[:-1]
    known = sorted({key[len(section)] for key in leaf_keys() if key[: len(section)] == section})
    beside = [".".join((*section, name)) for name in known]
    meant = did_you_mean(".".join(path), beside) or did_you_mean(path[-1], map(".".join, leaf_keys()))
    return f"{meant + ' Known' if meant else '; known'} keys here are {', '.join(known)}"
