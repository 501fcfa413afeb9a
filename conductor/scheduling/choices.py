"""The choice of the prefill instance among candidates with predicted times.

The rule is Algorithm 1, or another one for comparison:

    kvcache_centric, cache_aware  the least TTFT (Mooncake, sections 6 and 6.1; cache_aware fetches nothing)
    load_balancing                the fewest assigned requests (section 6.1)
    random                        any (section 6.2)
    banaserve                     the least measured utilisation (BanaServe, Algorithm 2)

Owns: these rules. Does not know: how times are estimated.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conductor.settings import PolicySettings
from conductor.view.estimators import Floats
from conductor.view.loads import Loads
from mooncake.config.policies import Scheduling

_TIE_BREAK = 1e-6
"""The weight of one assigned request. It is so small that it only decides between equal utilisations."""


class Candidates(NamedTuple):
    """The predicted seconds that a prompt would take on each instance, in arrays by slot."""

    queue_s: Floats
    rest_s: Floats
    """Seconds to get the prefix and to compute the rest of the prompt."""
    ttft_s: Floats
    """Seconds of queue and rest together; infinite if the instance cannot take the prompt."""
    is_remote: NDArray[np.bool_]
    """Whether the best prefix is fetched; else the instance's own prefix is used."""
    again_s: Floats
    """The part of `rest_s` for blocks that no instance holds yet, and that another instance will compute."""
    least: int
    """The slot with the least sum of TTFT and `again_s`; the first one if several are equal."""


Choice = Callable[[Candidates, Loads], int]
"""A function that returns the chosen slot. The slot's TTFT is infinite if no instance can take the prompt."""


def choice_of(settings: PolicySettings) -> Choice:
    """Return the choice function that the configuration names."""
    match settings.scheduling:
        case Scheduling.KVCACHE_CENTRIC | Scheduling.CACHE_AWARE:
            return least_ttft
        case Scheduling.LOAD_BALANCING:
            return fewest_requests
        case Scheduling.RANDOM:
            return RandomChoice(settings.seed)
        case Scheduling.BANASERVE:
            return LeastUtilised(settings.load_threshold)


def least_ttft(candidates: Candidates, loads: Loads) -> int:
    """Return the slot that Algorithm 1 chooses (lines 10 and 18).

    A prefix that is coming elsewhere is computed again only if that saves more time than the computation
    takes.
    """
    return candidates.least


def fewest_requests(candidates: Candidates, loads: Loads) -> int:
    """Return the slot with the fewest assigned requests; the first one if several are equal."""
    return _least(loads.num_assigned, candidates)


class RandomChoice:
    """The policy that chooses an instance with room at random. Equal seeds give equal choices."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, candidates: Candidates, loads: Loads) -> int:
        possible = np.flatnonzero(candidates.ttft_s < np.inf)
        return int(possible[self._random.randrange(len(possible))]) if len(possible) else 0


class LeastUtilised:
    """The policy of BanaServe's Algorithm 2: the least utilisation U, then the fewest requests.

    If no U is below `threshold` (delta_L), only the number of requests counts. U is measured from heartbeat
    to heartbeat; each prompt since the last heartbeat adds its estimated compute (line 15).
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def __call__(self, candidates: Candidates, loads: Loads) -> int:
        target = _least(loads.utilisation + _TIE_BREAK * loads.num_assigned, candidates)
        if loads.utilisation.item(target) < self._threshold:
            return target
        return _least(loads.num_assigned, candidates)


def _least(of: Floats | NDArray[np.int64], candidates: Candidates) -> int:
    return int(np.where(candidates.ttft_s < np.inf, of, np.inf).argmin())
