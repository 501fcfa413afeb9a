"""The result of a calibration: the costs of one server on one machine.

Owns: these costs, the fit of factors that are not negative. Does not know: how they are measured.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.tools.simulator.cluster.machines.costs import Profiled
from benchmarks.tools.simulator.cluster.machines.machine import IterationJitter
from benchmarks.tools.simulator.cluster.shape import NO_JOIN_COSTS, JoinCosts
from mooncake.messages.costs import Costs


class Corrected(Profiled):
    """The costs of a profile, corrected by measurements of the running server.

    The simulated Conductor still gets the costs of the profile.
    """

    def __init__(self, profiled: tuple[Costs, Costs], prefill: Costs, decode: Costs, beside: Costs) -> None:
        super().__init__(prefill, decode, beside)
        self.profiled = profiled


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured costs of one machine."""

    profiled: tuple[Costs, Costs]
    """The costs of prefill and of decode in the profile."""
    prefill: Costs
    decode: Costs
    beside: Costs
    """The costs in the running server: of prompts alone, of decoding, and of prompt tokens beside
    decoding."""
    first_token_s: float
    """Seconds before a first token that are not spent at an instance that computes the prompt."""
    longest_mean: float
    """The mean of the longest tenth of a request's gaps, divided by the mean of all gaps (`gap_s`)."""
    gap_s: float
    """The mean of all gaps between tokens, in seconds."""
    prompt_s: float = 0.0
    """Seconds for which each prompt occupies a prefill instance in addition to its passes."""
    slowdowns: tuple[float, float] = (1.0, 1.0)
    """The factors of prefill and of decode while another instance computes too."""
    join_costs: JoinCosts = NO_JOIN_COSTS
    """The costs of requests that join a batch with KVCache from elsewhere."""
    busy_prompt_s: float = 0.0
    """The value of `prompt_s` while the other instance computes all the time.

    Then the server's other processes, which do this work, have no core of their own.
    """

    @property
    def costs(self) -> Corrected:
        return Corrected(self.profiled, self.prefill, self.decode, self.beside)

    @property
    def jitter(self) -> IterationJitter:
        return IterationJitter(self.longest_mean, self.gap_s)


def mean(calibrations: Sequence[Calibration]) -> Calibration:
    """Return the mean of calibrations that begin with the same profile."""

    def of(field: str) -> Any:
        values = [getattr(calibration, field) for calibration in calibrations]
        return fmean(values) if isinstance(values[0], float) else tuple(map(fmean, zip(*values, strict=True)))

    return Calibration(
        calibrations[0].profiled,
        Costs(*of("prefill")),
        Costs(*of("decode")),
        Costs(*of("beside")),
        of("first_token_s"),
        of("longest_mean"),
        of("gap_s"),
        of("prompt_s"),
        of("slowdowns"),
        JoinCosts(*of("join_costs")),
        of("busy_prompt_s"),
    )


def times(factor: float, costs: Costs) -> Costs:
    """Return the costs of a device that takes `factor` times as long."""
    return Costs(*(factor * cost for cost in costs))


def non_negative(
    rows: Sequence[tuple[float, ...]], targets: Sequence[float], scales: Sequence[float]
) -> list[float]:
    """Return the non-negative factors with which the weighted sums of `rows` are nearest to `targets`.

    Errors are relative to `scales`. The function tries each set of factors that includes the first factor.
    All factors outside the set are 0.
    """
    features = np.array(rows) / np.array(scales)[:, None]
    values = np.array(targets) / np.array(scales)
    num_factors = features.shape[1]
    best, least = np.zeros(num_factors), float(np.square(values).sum())
    for are_used in itertools.product((True,), *[(True, False)] * (num_factors - 1)):
        used = np.flatnonzero(are_used)
        found = np.zeros(num_factors)
        found[used] = np.linalg.lstsq(features[:, used], values, rcond=None)[0]
        error = float(np.square(features @ found - values).sum())
        if found.min() >= 0 and error < least - 1e-12:
            best, least = found, error
    factors: list[float] = best.tolist()
    return factors
