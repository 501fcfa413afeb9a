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
