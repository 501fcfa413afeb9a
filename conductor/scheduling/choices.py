"""Which prefill instance is taken, given what a prompt would take on each: Algorithm 1's rule and its rivals.

    kvcache_centric, cache_aware  the least TTFT (Mooncake, section 6; the second, 6.1, knows no fetches)
    load_balancing                the fewest assigned requests (section 6.1)
    random                        any (section 6.2)
    banaserve                     the least utilization (BanaServe, Algorithm 2)

Owns: these rules. Does not know: how times are estimated.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conductor.rules import Rules
from conductor.view.estimators import Floats
from conductor.view.loads import Loads
from mooncake.config.policies import Scheduling

LOAD_THRESHOLD = 1.5
"""delta_L of BanaServe's Algorithm 2, in its utilization, which is 0 to 2"""
_BUSY_S = 1.0
"""an instance with so much work ahead counts as fully used"""


class Candidates(NamedTuple):
    """What a prompt would take; arrays by slot. `ttft_s` is infinite where the prompt cannot go."""

    queue_s: Floats
    rest_s: Floats
    """to have the prefix, and the prefill behind it"""
    ttft_s: Floats
    is_remote: NDArray[np.bool_]
    """whether the best prefix is fetched, or else the own one used"""
    least: int
    """the slot with the least TTFT; of several the first"""


Choice = Callable[[Candidates, Loads], int]
"""The slot that is chosen; one with an infinite TTFT if the prompt can go nowhere."""


def choice_of(rules: Rules) -> Choice:
    """As configured."""
    match rules.scheduling:
        case Scheduling.KVCACHE_CENTRIC | Scheduling.CACHE_AWARE:
            return least_ttft
        case Scheduling.LOAD_BALANCING:
            return fewest_requests
        case Scheduling.RANDOM:
            return RandomChoice(rules.seed)
        case Scheduling.BANASERVE:
            return least_utilized


def least_ttft(candidates: Candidates, loads: Loads) -> int:
    """Algorithm 1, lines 10 and 18: of several the first."""
    return candidates.least


def fewest_requests(candidates: Candidates, loads: Loads) -> int:
    """Of several the first."""
    return _least(loads.num_assigned, candidates)


class RandomChoice:
    """Seeded."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, candidates: Candidates, loads: Loads) -> int:
        possible = np.flatnonzero(candidates.ttft_s < np.inf)
        return int(possible[self._random.randrange(len(possible))]) if len(possible) else 0


def least_utilized(candidates: Candidates, loads: Loads) -> int:
    """BanaServe, Algorithm 2: the least compute and memory usage, each 0 to 1, then the shortest queue; the
    shortest queue alone if that one is above the threshold."""
    utilization = np.minimum(candidates.queue_s / _BUSY_S, 1.0) + loads.memory_usage
    target = _least(utilization + 1e-6 * loads.num_assigned, candidates)
    if utilization[target] < LOAD_THRESHOLD:
        return target
    return _least(loads.num_assigned, candidates)


def _least(of: Floats | NDArray[np.int64], candidates: Candidates) -> int:
    return int(np.where(candidates.ttft_s < np.inf, of, np.inf).argmin())
