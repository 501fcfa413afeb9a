"""The Conductor's settings, as values for its policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake.config.policies import Overload, Scheduling
from mooncake.messages.requests import Request
from mooncake.messages.workers import Role

DEFAULT_BALANCING_THRESHOLD = 1.25
DEFAULT_LOAD_THRESHOLD = 1.5


@dataclass(frozen=True, slots=True)
class ReplicationSettings:
    """Settings of the replication of hot prefixes."""

    period_s: float = 5.0
    uses_per_copy: float = 20.0
    """The number of recent uses of a prefix (`Heat.uses`) that justifies one more copy of the prefix."""
    most_bytes: int = 256 << 20
    """The most bytes of copies in flight; also the most bytes of copies that one period orders."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The settings of the Conductor's decisions.

    The defaults here are those of a bare policy. The defaults of `mooncake-serve` are in
    `mooncake/config/conductor_section.py`.
    """

    scheduling: Scheduling = Scheduling.KVCACHE_CENTRIC
    kvcache_balancing_threshold: float | None = DEFAULT_BALANCING_THRESHOLD
    """The balancing threshold, at least 1; None for a threshold that adapts."""
    overload: Overload = Overload.PREDICTION
    seed: int = 0
    """The seed of the `random` policy's choices."""
    replication: ReplicationSettings | None = None
    """Settings of the replication of hot prefixes; None if only the fetches of requests spread prefixes."""
    moves_requests: bool = False
    """Whether rules move running requests between decode instances."""
    has_rebalancing: bool = False
    """Whether instances change their roles as the load changes."""
    moves_modules: bool = False
    """Whether rules move layers and KV heads between decode instances."""
    has_inlining: bool = False
    """Whether a decode instance computes a prompt if that adds less waiting than a prefill instance would."""
    mixed_chunk_tokens: int = 256
    """The most tokens of an inlined prompt in an iteration, if no request of the batch has a TBT SLO."""
    load_threshold: float = DEFAULT_LOAD_THRESHOLD
    """The threshold delta_L of BanaServe's Algorithm 2, a utilisation from 0 to 2.

    With 0 only the numbers of assigned requests count.
    """

    def can(self, role: Role, stage: Role) -> bool:
        """Return whether an instance of this role can do `stage` of requests. A stage is one of `STAGES`."""
        if stage is Role.DECODE:
            return role is not Role.PREFILL
        return role is not Role.DECODE or self.has_inlining

    def inlines(self, role: Role) -> bool:
        """Return whether an instance of this role computes the prompts of the requests that it decodes."""
        return self.can(role, Role.PREFILL) and self.can(role, Role.DECODE)

    @property
    def fetches_prefixes(self) -> bool:
        """Whether prefill instances are told to fetch prefixes from other instances."""
        return self.scheduling in (Scheduling.KVCACHE_CENTRIC, Scheduling.BANASERVE)

    @property
    def has_double_check(self) -> bool:
        """Whether a decode instance checks the TBT SLO after prefill, and may refuse the request."""
        return self.overload is not Overload.BASELINE


class SLOs(NamedTuple):
    """A request's SLOs in seconds; None for no limit."""

    ttft_s: float | None
    tbt_s: float | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the Conductor: of requests, and of waiting times in seconds."""

    max_running_requests: int = 256
    max_attempts: int = 3
    """The failed attempts after which a request fails."""
    peer_timeout_s: float = 5.0
    """Seconds without a message after which a worker or a front counts as lost."""
    placement_timeout_s: float = 60.0
    """Seconds for which a request waits for a pair with room."""
    return_grace_s: float = 10.0
    """Seconds for which a lost instance is expected to register again."""
    switch_timeout_s: float = 30.0
    """Seconds after which a switch of an instance's role is undone."""
    max_migrations: int = 8
    """The most migrations from and to one instance at the same time, both kinds together."""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    slo_classes: Mapping[str, SLOs] = field(default_factory=dict)
    max_waiting: int = 0
    """The most requests in the admission queue."""
    slos: SLOs = field(init=False)
    """The SLOs of requests without an SLO class."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slos", SLOs(self.ttft_slo_s, self.tbt_slo_s))

    def slos_of(self, request: Request) -> SLOs:
        """Return the SLOs of the request's SLO class, or the general ones if it has no class."""
        return self.slo_classes.get(request.slo_class) or self.slos
