"""Goodput of a cluster: the highest rate at which enough requests are within both SLOs, by bisection.

Owns: what is known of each cluster's goodput. Does not know: which clusters are compared.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.simulator.summary import Summary
from benchmarks.tools.traces.request import TraceRequest
from mooncake.errors import ConfigError

FARTHEST = 64
"""times the first rate that is tried, or less than it: who fails below serves nothing"""

Load = Callable[[float], Iterable[TraceRequest]]
"""the requests at a rate"""


@dataclass(slots=True)
class Bracket:
    """Goodput is at least `low_per_s` and below `high_per_s`, None before a rate failed. `served` and
    `missed` are of the simulations at these two."""

    low_per_s: float = 0.0
    high_per_s: float | None = None
    served: Summary | None = None
    missed: Summary | None = None

    @property
    def limit(self) -> str:
        """Which SLO is missed first when the rate grows."""
        if self.missed is None:
            return ""
        return "TTFT" if self.missed.ttft_attainment < self.missed.tbt_attainment else "TBT"


@dataclass(slots=True)
class Goodputs:
    """Of clusters that all have the same SLOs. `attainment`: the share of the requests that must be within
    both. `on_simulation` is called before each one, with what is simulated and at which rate."""

    load: Load
    attainment: float
    on_simulation: Callable[[Setup, float], None] = lambda setup, rate_per_s: None
    num_simulations: int = 0
    _brackets: dict[Setup, Bracket] = field(default_factory=dict)

    def known(self, setup: Setup) -> Bracket:
        """What has been found so far."""
        return self._brackets.setdefault(setup, Bracket())

    def measure(self, setup: Setup, guess_per_s: float, precision: float) -> Bracket:
        """Until both ends of the bracket are at most `precision` apart, relative. Begins at the guess.

        Raises ConfigError for a cluster that cannot be, and for a load that is too short to tell.
        """
        bracket = self.known(setup)
        while bracket.high_per_s is None:
            if bracket.low_per_s > FARTHEST * guess_per_s:
                raise ConfigError(
                    f"{setup.name} serves {bracket.low_per_s:.3g} req/s and more: so few requests overload"
                    " nothing, simulate more of them"
                )
            self._try(setup, max(guess_per_s, 2 * bracket.low_per_s))
        while not bracket.low_per_s and bracket.high_per_s > guess_per_s / FARTHEST:
            self._try(setup, bracket.high_per_s / 4)
        while bracket.low_per_s and bracket.high_per_s > (1 + precision) * bracket.low_per_s:
            self._try(setup, (bracket.low_per_s * bracket.high_per_s) ** 0.5)
        return bracket

    def serves(self, setup: Setup, rate_per_s: float) -> bool:
        """Whether the goodput is at least this; one simulation, if it is not known. Raises ConfigError."""
        bracket = self.known(setup)
        if rate_per_s <= bracket.low_per_s:
            return True
        if bracket.high_per_s is not None and rate_per_s >= bracket.high_per_s:
            return False
        return self._try(setup, rate_per_s)

    def _try(self, setup: Setup, rate_per_s: float) -> bool:
        self.on_simulation(setup, rate_per_s)
        self.num_simulations += 1
        simulated, _ = simulate(setup, self.load(rate_per_s))
        summary, bracket = simulated.summary, self.known(setup)
        is_served = summary.effective_share >= self.attainment
        if is_served:
            bracket.low_per_s, bracket.served = rate_per_s, summary
        else:
            bracket.high_per_s, bracket.missed = rate_per_s, summary
        return is_served
