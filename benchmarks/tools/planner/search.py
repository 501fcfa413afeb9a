"""The search for the best cluster, as in DistServe but with this project's simulator.

The numbers of prefill and of decode instances are a cluster's *division*. As instances move from one role to
the other, goodput rises and falls once: with too few prefill instances the TTFT SLO is missed, with too few
decode instances the TBT SLO. So the search begins with the division for which the performance model predicts
the highest goodput (`conductor.elasticity.capacity`), and walks to a neighbour while the neighbour is better.

A rival must serve the rate at which the best cluster so far fails; if it does not, a single simulation is
enough. With a small chunk size coupled instances need more iterations for a prompt, with a large chunk size
their iterations take longer. So the search begins with the middle size, and walks in steps that are halved.

Clusters that the search only passes are simulated with one seed. Clusters that it compares in the end and
reports are simulated with all seeds.

With weights, clusters are compared by BanaServe's objective J (section 4.3, equations 18 and 31) instead,
each at its goodput, the highest rate within the latency budgets (equation 29). One simulation does not tell
then that a rival is worse. So the goodput of each cluster is found, and walks go to neighbours with a larger
J.

Owns: the order of the search, and what it has found. Does not know: how goodput is found, what it means.
"""

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

from benchmarks.tools.planner import placements
from benchmarks.tools.planner.goodput import Bracket, Goodputs
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.setup import Setup
from conductor.elasticity.capacity import Division, DivisionCapacity
from conductor.elasticity.demand import OfferedLoad
from conductor.performance.model import Sizes
from conductor.performance.objective import Terms, Weights

COARSE, FINE = 0.08, 0.03
"""The relative precision of goodputs: COARSE while the search walks, FINE for reported clusters."""


class Candidate(msgspec.Struct, frozen=True):
    """A cluster and its goodput in requests a second.

    If `is_bound`, the goodput is only an upper bound. `least_per_s` and `most_per_s` are the least and the
    largest goodput of a single seed. Times are 90th percentiles, at the goodput. `terms` are those of
    BanaServe's objective at the goodput; None if the cluster serves nothing within the SLOs.
    """

    setup: Setup
    goodput_per_s: float
    is_bound: bool
    least_per_s: float
    most_per_s: float
    limit: str
    ttft_p90_s: float | None
    tbt_p90_s: float | None
    terms: Terms | None


def score_of(goodput_per_s: float, terms: Terms | None, weights: Weights | None) -> float:
    """Return the figure by which clusters are compared; the more, the better.

    The figure is the goodput or, with weights, J at the goodput. A cluster that serves nothing within the
    SLOs has no J and is worse than all others, so its figure is minus infinity.
    """
    if weights is None:
        return goodput_per_s
    return -math.inf if terms is None else terms.objective(weights)


class Plan(msgspec.Struct, frozen=True):
    """The best clusters of a search.

    `disaggregated` is None if there are too few devices for two instances. `others` are all further clusters
    that were examined. `next_ones` have one more instance than the best cluster. `weights` are those of
    BanaServe's objective; None if clusters are compared by their goodput.
    """

    disaggregated: Candidate | None
    coupled: Candidate
    neighbours: list[Candidate]
    others: list[Candidate]
    next_ones: list[Candidate]
    num_simulations: int
    weights: Weights | None = None

    @property
    def best(self) -> Candidate:
        """The better cluster. If both are equally good it is the coupled one, because it is simpler."""
        ours = self.disaggregated
        return self.coupled if ours is None or self.score(ours) <= self.score(self.coupled) else ours

    def score(self, candidate: Candidate) -> float:
        """Return the figure by which a cluster of this plan is compared, as `score_of`."""
        return score_of(candidate.goodput_per_s, candidate.terms, self.weights)


class Search:
    """The search for the best cluster of `num_devices` devices, in instances of one of `group_sizes`.

    `base` has model, hardware, SLOs and policies. `goodputs` simulates with all seeds. `weights` are those of
    BanaServe's objective; None to compare goodputs.
    """

    def __init__(
        self,
        goodputs: Goodputs,
        base: Setup,
        num_devices: int,
        group_sizes: Sequence[int],
        sizes: Sizes,
        weights: Weights | None = None,
    ) -> None:
        self._goodputs, self._base, self._num_devices, self._sizes = goodputs, base, num_devices, sizes
        self._passing = Goodputs(goodputs.load, goodputs.attainment, goodputs.on_simulation)
        """Goodputs of clusters that the search only passes, with the first seed alone."""
        self._group_sizes, self._weights = group_sizes, weights
        self._guess_per_s = self._most_prompts_per_s()
        self._seen: dict[Setup, None] = {}

    def _most_prompts_per_s(self) -> float:
        """Return the requests a second whose prompts alone keep all devices busy."""
        size = self._group_sizes[0]
        costs = msgspec.structs.replace(self._base, num_gpus=size, num_coupled=1).shape().costs
        prompt = PromptShare(round(self._sizes.num_prompt_tokens), 0)
        return self._num_devices / size / costs.iteration_s([prompt], 0)

    def _expected_per_s(self, setup: Setup) -> float:
        """Return the goodput that the performance model predicts for a disaggregated cluster."""
        sizes, (prefill, _) = self._sizes, setup.shape().costs.profiled
        load = OfferedLoad(1.0, sizes.prefill_s(prefill), sizes.num_output_tokens, *sizes[:2], window_s=1.0)
        division = Division(setup.num_prefill, setup.num_decode)
        return DivisionCapacity(load, setup.decode_capacity()).requests_per_s(division)

    def run(self) -> Plan:
        """Run the search, and return the plan. Raises ConfigError."""
        ours, rival = self._best_disaggregated(), self._best_coupled()
        nearby = [] if ours is None else [self._fine(setup) for setup in placements.neighbours(ours)]
        best = rival if ours is None or self._fine_score(ours) <= self._fine_score(rival) else ours
        next_ones = [self._fine(setup) for setup in placements.one_more(best)]
        shown = {ours, rival, *nearby, *next_ones}
        return Plan(
            None if ours is None else self._candidate(ours),
            self._candidate(rival),
            [self._candidate(setup) for setup in nearby],
            [self._candidate(setup) for setup in self._seen if setup not in shown],
            [self._candidate(setup) for setup in next_ones],
            self._goodputs.num_simulations + self._passing.num_simulations,
            self._weights,
        )

    def _best_disaggregated(self) -> Setup | None:
        best = None
        for size in self._group_sizes:
            num = self._num_devices // size
            divisions = [placements.disaggregated(self._base, size, p, num - p) for p in range(1, num)]
            if divisions:
                expected = max(divisions, key=self._expected_per_s)
                self._guess_per_s = self._expected_per_s(expected)
                best = self._walk(divisions, best, divisions.index(expected), step=1)
        return None if best is None else self._climb(self._fine(best))

    def _best_coupled(self) -> Setup:
        best = None
        for size in self._group_sizes:
            whole = placements.coupled(self._base, size, self._num_devices // size)
            best = self._better(best, whole)
            if chunked := placements.chunked(whole):
                best = self._walk(chunked, best, len(chunked) // 2, step=max(1, len(chunked) // 4))
        assert best is not None
        return self._fine(best)

    def _climb(self, best: Setup) -> Setup:
        """Walk from cluster to cluster while a neighbour is better. Returns the last one."""
        while True:
            nearby = [self._fine(setup) for setup in placements.neighbours(best)]
            better = max([best, *nearby], key=self._fine_score)
            if better == best:
                return best
            best = better

    def _walk(self, divisions: Sequence[Setup], best: Setup | None, index: int, step: int) -> Setup | None:
        """Return the best of all clusters that the walk tries, and of `best`, the best one so far.

        `divisions` are in order. The walk begins at `index`, and tries the divisions `step` places before and
        after it.
        """
        best = self._better(best, divisions[index])
        while True:
            for tried in (index - step, index + step):
                if 0 <= tried < len(divisions):
                    best = self._better(best, divisions[tried])
            before, index = index, divisions.index(best) if best in divisions else index
            if index == before:
                if step == 1:
                    return best
                step //= 2

    def _better(self, best: Setup | None, setup: Setup) -> Setup:
        if best is None or setup == best:
            self._pass(setup)
            return setup
        self._seen[setup] = None
        if self._weights is not None:
            self._pass(setup)
            return max(best, setup, key=lambda of: self._score(self._passing.known(of)))
        beyond_per_s = self._passing.known(best).high_per_s
        assert beyond_per_s is not None
        if not self._passing.serves(setup, beyond_per_s):
            return best
        self._pass(setup)
        return setup

    def _fine(self, setup: Setup) -> Setup:
        self._seen[setup] = None
        guess_per_s = self._pass(setup)
        if guess_per_s:
            self._goodputs.measure(setup, guess_per_s, FINE, step=1 + COARSE)
        return setup

    def _pass(self, setup: Setup) -> float:
        low_per_s = self._passing.measure(setup, self._guess_per_s, COARSE).low_per_s
        self._guess_per_s = low_per_s or self._guess_per_s
        return low_per_s

    def _fine_score(self, setup: Setup) -> float:
        return self._score(self._goodputs.known(setup))

    def _score(self, known: Bracket) -> float:
        return score_of(known.low_per_s, known.terms, self._weights)

    def _candidate(self, setup: Setup) -> Candidate:
        exact = self._goodputs.known(setup)
        known = exact if exact.trials else self._passing.known(setup)
        is_bound = known.served is None and known.high_per_s is not None
        rate = known.high_per_s if is_bound and known.high_per_s is not None else known.low_per_s
        by_seed = [rate] if is_bound else known.by_seed(self._goodputs.attainment)
        at = None if known.served is None else known.served.summaries
        return Candidate(
            setup,
            rate,
            is_bound,
            min(by_seed),
            max(by_seed),
            known.limit,
            None if at is None else fmean(summary.ttft_s.p90 for summary in at),
            None if at is None else fmean(summary.tbt_s.p90 for summary in at),
            known.terms,
        )
