"""How the Conductor decides, as configured. Pure values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from conductor.balancing import START
from mooncake.config.policies import Overload, Scheduling
from mooncake.messages.requests import Request


@dataclass(frozen=True, slots=True)
class ReplicationRules:
    """How eagerly prefixes are copied before they are asked for."""

    period_s: float = 5.0
    uses_per_copy: float = 20.0
    """lately, for which a prefix is worth one copy more"""
    most_bytes: int = 256 << 20
    """under way, and ordered in one period"""


@dataclass(frozen=True, slots=True)
class Rules:
    """`kvcache_balancing_threshold` is at least 1; None if it adapts."""

    scheduling: Scheduling = Scheduling.KVCACHE_CENTRIC
    kvcache_balancing_threshold: float | None = START
    overload: Overload = Overload.PREDICTION
    seed: int = 0
    """of what is chosen at random"""
    replication: ReplicationRules | None = None
    """None: prefixes spread by forwarded requests alone"""

    @property
    def fetches_prefixes(self) -> bool:
        """Whether prefill instances are told of others' KVCache."""
        return self.scheduling in (Scheduling.KVCACHE_CENTRIC, Scheduling.BANASERVE)


class SLOs(NamedTuple):
    """What a request is promised, in seconds; None: nothing."""

    ttft_s: float | None
    tbt_s: float | None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the Conductor may keep and how long it waits. Times in seconds."""

    max_running_requests: int = 256
    max_attempts: int = 3
    peer_timeout_s: float = 5.0
    placement_timeout_s: float = 60.0
    return_grace_s: float = 10.0
    retry_after_s: float = 1.0
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    slo_classes: Mapping[str, SLOs] = field(default_factory=dict)
    max_waiting: int = 0
    """requests that may wait for load to fall, while their TTFT SLO allows it"""
    slos: SLOs = field(init=False)
    """of requests of no class"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slos", SLOs(self.ttft_slo_s, self.tbt_slo_s))

    def slos_of(self, request: Request) -> SLOs:
        """Those of its class, or of all."""
        return self.slo_classes.get(request.slo_class) or self.slos
