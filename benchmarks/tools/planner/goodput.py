"""The goodput of a cluster, found by bisection.

Goodput is the highest rate at which enough requests are within both SLOs.

Owns: what is known of each cluster's goodput. Does not know: which clusters are compared.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import msgspec

from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.simulator.summary import Summary
from benchmarks.tools.traces.request import TraceRequest
from conductor.performance.objective import Terms
from mooncake.errors import ConfigError

FARTHEST = 64
"""The largest factor between the first rate that is tried and other rates.

A cluster that misses the SLOs at all these rates is useless.
"""

Load = Callable[[float, int], Iterable[TraceRequest]]
"""A function that returns the requests at a rate (requests a second).

Its second argument is a seed's index.
"""


class Trial(NamedTuple):
    """The simulations at one rate, one for each seed."""

    rate_per_s: float
    summaries: tuple[Summary, ...]
    terms: Terms
    """The terms of BanaServe's objective, as means over all seeds."""

    @property
    def effective_share(self) -> float:
        """The share of effective requests, over all seeds."""
        return fmean(summary.effective_share for summary in self.summaries)

    @property
    def limit(self) -> str:
        """The SLO that more requests miss, "TTFT" or "TBT"."""
        ttft = fmean(summary.ttft_attainment for summary in self.summaries)
        return "TTFT" if ttft < fmean(summary.tbt_attainment for summary in self.summaries) else "TBT"


@dataclass(slots=True)
class Bracket:
    """The bounds of a goodput in requests a second: at least `low_per_s`, and below `high_per_s`.

    `high_per_s` is None until a rate was missed. `served` and `missed` are the trials at these two rates.
    """

    low_per_s: float = 0.0
    high_per_s: float | None = None
    served: Trial | None = None
    missed: Trial | None = None
    trials: list[Trial] = field(default_factory=list)

    @property
    def limit(self) -> str:
        """The SLO that is missed first when the rate grows; empty if none was missed."""
        return "" if self.missed is None else self.missed.limit

    @property
    def terms(self) -> Terms | None:
        """The terms of BanaServe's objective at the highest rate that was served; None if none was."""
        return None if self.served is None else self.served.terms

    def by_seed(self, attainment: float) -> list[float]:
        """Return for each seed the highest tried rate that it serves by itself.

        Rates above the lowest rate that the seed misses do not count.
        """
        found = []
        for of_seed in zip(*(trial.summaries for trial in self.trials), strict=True):
            rates = [
                (trial.rate_per_s, summary.effective_share >= attainment)
                for trial, summary in zip(self.trials, of_seed, strict=True)
            ]
            missed_per_s = min((rate for rate, is_served in rates if not is_served), default=math.inf)
            found.append(
                max((rate for rate, is_served in rates if is_served and rate < missed_per_s), default=0.0)
            )
        return found


@dataclass(slots=True)
class Goodputs:
    """The goodputs of clusters that all have the same SLOs.

    `attainment` is the share of the requests, over all seeds, that must be within both SLOs. `on_simulation`
    is called before each simulation, with the cluster and the rate.
    """

    load: Load
    attainment: float
    on_simulation: Callable[[Setup, float], None] = lambda setup, rate_per_s: None
    num_seeds: int = 1
    num_simulations: int = 0
    _brackets: dict[Setup, Bracket] = field(default_factory=dict)

    def known(self, setup: Setup) -> Bracket:
        """Return the bounds of a cluster's goodput that are known so far."""
        return self._brackets.setdefault(setup, Bracket())

    def measure(self, setup: Setup, guess_per_s: float, precision: float, step: float = 2.0) -> Bracket:
        """Return the bounds of a cluster's goodput, at most `precision` apart (a share of the lower bound).

        A rate is *served* if enough requests are within both SLOs, otherwise it is *missed*. The search
        begins at `guess_per_s`. The rate is multiplied by `step` until a rate is missed, or divided by `step`
        squared until a rate is served. Then the interval between both is bisected.

        Raises ConfigError for an impossible cluster, and for a load that is too short for an answer.
        """
        bracket = self.known(setup)
        while bracket.high_per_s is None:
            if bracket.low_per_s > FARTHEST * guess_per_s:
                raise ConfigError(
                    f"{setup.name} serves {bracket.low_per_s:.3g} req/s and more: so few requests overload"
                    " nothing, simulate more of them"
                )
            self._try(setup, max(guess_per_s, step * bracket.low_per_s))
        while not bracket.low_per_s and bracket.high_per_s > guess_per_s / FARTHEST:
            self._try(setup, bracket.high_per_s / step**2)
        while bracket.low_per_s and bracket.high_per_s > (1 + precision) * bracket.low_per_s:
            self._try(setup, (bracket.low_per_s * bracket.high_per_s) ** 0.5)
        return bracket

    def serves(self, setup: Setup, rate_per_s: float) -> bool:
        """Return whether the goodput is at least this rate, after one trial if it is unknown.

        Raises ConfigError.
        """
        bracket = self.known(setup)
        if rate_per_s <= bracket.low_per_s:
            return True
        if bracket.high_per_s is not None and rate_per_s >= bracket.high_per_s:
            return False
        return self._try(setup, rate_per_s)

    def _try(self, setup: Setup, rate_per_s: float) -> bool:
        runs = []
        for nth in range(self.num_seeds):
            self.on_simulation(setup, rate_per_s)
            self.num_simulations += 1
            runs.append(simulate(setup, self.load(rate_per_s, nth))[0])
        terms = Terms(*map(fmean, zip(*(msgspec.structs.astuple(run.terms) for run in runs), strict=True)))
        trial, bracket = Trial(rate_per_s, tuple(run.summary for run in runs), terms), self.known(setup)
        bracket.trials.append(trial)
        is_served = trial.effective_share >= self.attainment
        if is_served:
            bracket.low_per_s, bracket.served = rate_per_s, trial
        else:
            bracket.high_per_s, bracket.missed = rate_per_s, trial
        return is_served
