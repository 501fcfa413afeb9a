"""Arrival times for loads that are made without a trace.

Owns: arrival processes. Does not know: requests.
"""

import itertools
import random
from collections.abc import Iterator

from benchmarks.tools.traces.request import TraceError


def arrivals(rate_per_s: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield arrival times in seconds, ascending, without end. The gaps are drawn from a gamma distribution.

    `burstiness` is the variance of the number of arrivals in a long window, divided by its mean: 1 is a
    Poisson process, 0 a clock, and above 1 arrivals come in bursts. Raises TraceError.
    """
    if rate_per_s <= 0 or burstiness < 0:
        raise TraceError(
            f"expected a rate above 0 and a burstiness of 0 or more, got {rate_per_s:g} and {burstiness:g}"
        )
    if burstiness == 0:
        return (number / rate_per_s for number in itertools.count(1))
    # For a renewal process this ratio is the gaps' squared coefficient of variation: 1 / shape of a gamma.
    return itertools.accumulate(
        rng.gammavariate(1 / burstiness, burstiness / rate_per_s) for _ in itertools.repeat(None)
    )
