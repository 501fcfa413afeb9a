"""How the Conductor decides, as configured. Pure values."""

from dataclasses import dataclass

from mooncake.config import Overload, Scheduling


@dataclass(frozen=True, slots=True)
class Rules:
    """`kvcache_balancing_threshold` is at least 1."""

    scheduling: Scheduling = Scheduling.KVCACHE_CENTRIC
    kvcache_balancing_threshold: float = 1.25
    overload: Overload = Overload.PREDICTION
    seed: int = 0
    """of what is chosen at random"""

    @property
    def fetches_prefixes(self) -> bool:
        """Whether prefill instances are told of others' KVCache."""
        return self.scheduling in (Scheduling.KVCACHE_CENTRIC, Scheduling.BANASERVE)


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
