"""The conductor's section of the configuration.

Owns: its keys with their types, bounds, defaults and meanings. Does not know: files, flags, variables
(`mooncake.config.settings`), the users of a value.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field

from mooncake.config.policies import Overload, Scheduling
from mooncake.config.sections import NAME, Endpoint, PositiveSeconds, Section


class SLOClass(Section):
    """The SLOs and the priority of a class of requests."""

    ttft_slo_s: PositiveSeconds | None = None
    tbt_slo_s: PositiveSeconds | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0


def _from_json(value: object) -> object:
    """Return a flag's or variable's value, parsed from the JSON that stands for YAML's mapping.

    A value of another type is returned unchanged. Raises ValueError.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"expected a JSON object ({error})") from None


SLOClassName = Annotated[str, Field(pattern=NAME)]


class ConductorConfig(Section):
    """The conductor's listeners and limits."""

    endpoint: Endpoint = Field(
        "tcp://127.0.0.1:7800",
        description="where workers and other fronts find it (ZeroMQ)",
    )
    listen_endpoint: Endpoint | None = Field(
        None,
        description="where it listens for them, if that is another one: tcp://0.0.0.0:7800, or tcp://[::]:7800;"
        " default: endpoint",
    )
    reply_endpoint: Endpoint = Field(
        "tcp://127.0.0.1:7801",
        description="where workers send tokens to (ZeroMQ); each front has its own",
    )
    reply_listen_endpoint: Endpoint | None = Field(
        None, description="where a front listens for them, if that is another one; default: reply_endpoint"
    )
    state_file: Path | None = Field(
        None,
        description="what outlives the conductor (SQLite): context caches, tokens that API keys have left;"
        " with cluster.etcd_endpoints etcd has them instead; default:"
        " $XDG_STATE_HOME/mooncake-serve/conductor-PORT.db (~/.local/state/...), with http.port 0 in the run"
        " directory",
    )
    max_running_requests: int = Field(
        256,
        ge=1,
        description="requests beyond it get HTTP 429, unless their API key has less than an equal part",
    )
    ttft_slo_s: PositiveSeconds | None = Field(
        None,
        description="when a first token is due: prefill instances compute in this order, what would miss it"
        " gets HTTP 429; default: in order of arrival",
    )
    tbt_slo_s: PositiveSeconds | None = Field(
        None,
        description="how long a token may take: requests with which it would take longer get HTTP 429;"
        " default: any time",
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
        ByteSize(256 << 20), description="of copies in flight, and of those that are ordered in one period"
    )
    inlining: bool = Field(
        True,
        description="decode instances too compute prompts, in chunks beside what they decode, where that"
        " adds less waiting than a prefill instance",
    )
    rebalancing: bool = Field(
        True,
        description="change the roles of instances as the load does, where at least two may have another one",
    )
    migrate_for_slos: bool = Field(
        True,
        description="move running requests to other decode instances where an SLO would be missed, a stricter"
        " class lacks headroom, or a long request lacks device pages",
    )
    migrate_modules: bool = Field(
        False,
        description="move layers of instances, and KV heads of decode instances, to helpers on their host"
        " where utilisation differs much; only with rebalancing",
    )
    overload: Overload = Field(
        Overload.PREDICTION,
        description="what rejects requests that would miss ttft_slo_s or tbt_slo_s: baseline,"
        " early_rejection, prediction or request_prediction",
    )
    profile: Path | None = Field(
        None,
        description="costs of the model on the instances' device (mooncake-serve profile FILE); default:"
        " learned",
    )
    record: Path | None = Field(
        None,
        description="record the requests of this process's front in this file, as a trace without text that"
        " mooncake-bench and mooncake-sim play; a number is added to the name of a file that exists",
    )
    record_bytes: ByteSize = Field(
        ByteSize(256 << 20), ge=1, description="size of that file at which recording ends"
    )
    peer_timeout_s: float = Field(5.0, ge=3.0, description="silence after which a peer counts as dead")
    absence_timeout_s: float = Field(
        60.0,
        ge=0.0,
        description="how long workers, and fronts in processes of their own, go on with what runs while there"
        " is no conductor",
    )
    placement_timeout_s: PositiveSeconds = Field(
        60.0, description="how long a request waits for a lost instance to come back"
    )
    switch_timeout_s: PositiveSeconds = Field(
        30.0,
        description="how long an instance that is to have another role may finish what it runs; then it keeps"
        " the one that it has",
    )

    @property
    def listens_at(self) -> str:
        """The endpoint at which the Conductor's own socket listens."""
        return self.listen_endpoint or self.endpoint
