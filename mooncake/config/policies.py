"""The policies that a cluster can choose between, by their names in the configuration.

Owns: names. Does not know: what a policy does, who asks for it.
"""

from enum import StrEnum


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
