"""The times until rejected requests get their 429, measured by clients and by the server.

Owns: which rejections were made at arrival, the server's histogram. Does not know: how requests are sent.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import httpx
import numpy as np

from benchmarks.tools.load.outcomes import Kind, Outcome

_AT_ARRIVAL = "the cluster is overloaded"
"""The beginning of the text of rejections at arrival. Later rejections have other texts."""
_HISTOGRAM = "mooncake_time_to_rejection_seconds_bucket"


class Rejections(NamedTuple):
    """The seconds from requests to their 429.

    `servers` has the server's counts of all rejections, by upper bound in seconds.
    """

    at_arrival_s: list[float]
    later_s: list[float]
    servers: dict[float, int]

    def percentiles_s(self) -> list[float]:
        """Return the p50, p99 and longest time of rejections at arrival; empty if there were none."""
        if not self.at_arrival_s:
            return []
        return [float(value) for value in np.percentile(self.at_arrival_s, [50, 99, 100])]

    def servers_bound_s(self, share: float) -> float | None:
        """Return the seconds within which the server decided this share of the rejections at arrival.

        The server counts all rejections. The method assumes that rejections at arrival are the quickest ones.
        Returns None if there were no rejections at arrival.
        """
        num_at_arrival = len(self.at_arrival_s)
        bounds = [bound for bound, count in sorted(self.servers.items()) if count >= share * num_at_arrival]
        return bounds[0] if num_at_arrival and bounds else None


def rejections(outcomes: Iterable[Outcome], before: dict[float, int], after: dict[float, int]) -> Rejections:
    """Return the rejections of one run.

    `before` and `after` are the results of `servers_histogram` before and after the run.
    """
    rejected = [outcome for outcome in outcomes if outcome.kind is Kind.REJECTED]
    return Rejections(
        _seconds(outcome for outcome in rejected if _AT_ARRIVAL in outcome.error),
        _seconds(outcome for outcome in rejected if _AT_ARRIVAL not in outcome.error),
        {bound: count - before[bound] for bound, count in after.items()},
    )


def _seconds(outcomes: Iterable[Outcome]) -> list[float]:
    return [outcome.answered_s - outcome.lag_s for outcome in outcomes]


def servers_histogram(url: str) -> dict[float, int]:
    """Return the number of rejections so far, by the upper bound of their time in seconds."""
    lines: Sequence[str] = httpx.get(f"{url}/metrics", timeout=10.0).raise_for_status().text.splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith(_HISTOGRAM)]
    return {float(name.split('le="')[1].split('"')[0]): int(float(count)) for name, count in found}
