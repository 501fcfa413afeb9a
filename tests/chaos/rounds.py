"""A sequence of faults, and the invariants that must hold when the cluster has recovered from each of them.

Owns: the sequence, the invariants, the records. Does not know: how faults are made.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from tests.chaos.cluster import FRONTS, Cluster
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.load import Asking, Load, Outcome, catalogue
from tests.cluster.tiny_cluster import samples

_ANSWERS_BEFORE = 2
"""The number of answers that clients of each front get before a fault."""


@dataclass
class Round:
    """The record of one fault, or of several at once. `problems` are violated invariants."""

    name: str
    lasted_s: float
    answered_s: float = 0.0
    """Seconds from the beginning of the fault to the first answer to a request that was sent after it."""
    whole_s: float = 0.0
    """Seconds from the end of the fault until the cluster was complete and idle."""
    ends: "Counter[str]" = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    is_over: bool = False
    """Whether the cluster has not recovered."""

    @property
    def num_broken(self) -> int:
        """The number of requests that their clients have to send again."""
        return sum(self.ends[end] for end in ("refused", "failed", "cut"))


@dataclass(frozen=True)
class _FrontCount:
    """The process of a front, and the number of requests that it has counted."""

    pid: int
    num_requests: float


class Chaos:
    """A cluster under load to which faults happen."""

    def __init__(self, cluster: Cluster, load: Load, rng: random.Random) -> None:
        self._cluster, self._load, self._rng = cluster, load, rng
        self._counts: dict[str, _FrontCount] = {}

    def begin(self) -> None:
        """Wait until the cluster is complete and idle."""
        self._calm_down()
        self._counts = self._count()

    def go_through(self, names: Sequence[str], longest_s: float) -> Round:
        """Apply faults at the same time, then check all invariants.

        Faults that last are applied for a random time of at most `longest_s` seconds.
        """
        first = len(self._load.outcomes)
        faults = [FAULTS[name](self._cluster, self._rng) for name in names]
        hold_s = self._rng.uniform(longest_s / 4, longest_s) if any(fault.lasts for fault in faults) else 0.0
        record = Round(" + ".join(fault.name for fault in faults), hold_s)
        began_s = ended_s = time.monotonic()
        try:
            self._load.resume()
            self._load.wait_for_answers(_ANSWERS_BEFORE)
            began_s = ended_s = time.monotonic()
            with contextlib.ExitStack() as stack:
                for fault in faults:
                    stack.enter_context(fault.applied)
                time.sleep(hold_s)  # that is how long it lasts
            ended_s = time.monotonic()
            record.answered_s = self._load.wait_for_answer_since(began_s)
            self._calm_down()
        except AssertionError as error:
            record.problems.append(str(error))
            record.is_over = True
        record.whole_s = time.monotonic() - ended_s
        outcomes = self._load.outcomes[first:]
        record.ends.update(outcome.end for outcome in outcomes)
        record.problems += self._problems(outcomes, faults, ended_s)
        return record

    def _calm_down(self) -> None:
        self._cluster.wait_until_whole()
        self._load.pause()
        self._cluster.wait_until_nothing_is_held()

    def _problems(
        self, outcomes: Sequence[Outcome], faults: Sequence[Fault], ended_s: float
    ) -> Iterator[str]:
        excused = {front for fault in faults for front in fault.fronts}
        for outcome in outcomes:
            if outcome.wrong:
                yield outcome.wrong
            elif outcome.end == "cut" and outcome.front not in excused:
                yield f"{outcome.front} broke a connection: {outcome}"
        before, self._counts = self._counts, self._count()
        for front, now in self._counts.items():
            then = before.get(front)
            if then is not None and then.pid == now.pid:
                yield from _differences(front, now.num_requests - then.num_requests, outcomes)

    def _count(self) -> dict[str, _FrontCount]:
        counts = {}
        for front in FRONTS:
            node = self._cluster.nodes[front]
            with contextlib.suppress(httpx.HTTPError, KeyError):
                [by_end] = samples(node, "mooncake_requests_total")
                counts[front] = _FrontCount(node.children()["front"], sum(by_end.values()))
        return counts


def _differences(front: str, num_counted: float, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a problem if the front has not counted each request that reached it exactly once."""
    reached = Counter(outcome.reached for outcome in outcomes if outcome.front == front)
    if not reached[True] <= num_counted <= reached[True] + reached[None]:
        came = f"of {reached[True]}, and {reached[None]} that may have come"
        yield f"{front} has counted {num_counted:g} requests {came}"


@contextlib.contextmanager
def chaos(cluster: Cluster, seed: int) -> Iterator[Chaos]:
    """Make a context in which clients send requests with known answers."""
    urls = {front: cluster.nodes[front].url for front in FRONTS}
    with contextlib.closing(Asking(urls[FRONTS[0]])) as asking:
        known = catalogue(asking)
    with Load(urls, known, seed) as load:
        going = Chaos(cluster, load, random.Random(seed))
        going.begin()
        yield going
