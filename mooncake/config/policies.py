"""The policies that a cluster can choose between, by their names in the configuration.

Owns: names. Does not know: what a policy does.
"""

from enum import StrEnum


class EvictionPolicy(StrEnum):
    """Eviction policies of the pool (Mooncake, Table 1)."""

    LRU = "lru"
    LFU = "lfu"
    LENGTH_AWARE = "length_aware"


class Scheduling(StrEnum):
    """Policies that choose a prefill instance (Mooncake, section 6; BanaServe, Algorithm 2)."""

    KVCACHE_CENTRIC = "kvcache_centric"
    CACHE_AWARE = "cache_aware"
    LOAD_BALANCING = "load_balancing"
    RANDOM = "random"
    BANASERVE = "banaserve"


class Overload(StrEnum):
    """Policies that reject requests (Mooncake, section 7)."""

    BASELINE = "baseline"
    EARLY_REJECTION = "early_rejection"
    PREDICTION = "prediction"
    REQUEST_PREDICTION = "request_prediction"
