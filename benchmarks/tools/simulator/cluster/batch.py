"""A running batch of continuous batching, advanced many iterations at a time.

While no request joins or leaves, iteration i of a run takes `fixed_s + kv_token_s * (num_kv_tokens + i *
size)`. So there is a closed form for the time of n iterations, and for the number of iterations that have
begun by a given time. The gaps between a request's tokens are kept as runs of iterations, not token by token.

Owns: the members of the batch, the number of its iterations, the times between tokens. Does not know: the
clock, why a request joins.
"""

import heapq
import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

LONGEST_SHARE = 0.1
"""The share of a request's token gaps that count for its TBT: the longest ones (Mooncake, FAST'25)."""
_MAX_RUNS = 4096
Gaps = list[tuple[int, float]]
"""Gaps between tokens, as pairs (number of gaps, seconds of each)."""


@dataclass(slots=True, eq=False)
class Member:
    """One request in the batch.

    When it joins, `num_tokens` tokens have KVCache, and `num_left` tokens are still to be drawn.
    """

    number: int
    """The request's number in order of arrival."""
    num_tokens: int
    num_left: int
    left_s: float = 0.0
    """The time of the latest token before the request joined."""
    gaps: Gaps = field(default_factory=list)
    joined_iteration: int = 0
    first_run: int = 0
    waited_s: float = 0.0

    @property
    def last_iteration(self) -> int:
        """The iteration that draws the last token."""
        return self.joined_iteration + self.num_left


class IterationCost(NamedTuple):
    """The cost of an iteration of the present batch: a fixed part, and a part for each token of KVCache."""

    fixed_s: float
    kv_token_s: float

    def iterations_s(self, num_kv_tokens: int, size: int, num_iterations: int) -> float:
        """Return the seconds of the next `num_iterations` iterations of a batch of `size` requests."""
        num_grown = size * num_iterations * (num_iterations - 1) / 2
        return num_iterations * (self.fixed_s + self.kv_token_s * num_kv_tokens) + self.kv_token_s * num_grown

    def iterations_by(self, num_kv_tokens: int, size: int, seconds: float) -> int:
        """Return the number of iterations that have begun before `seconds` have passed; at least one."""
        first_s = self.fixed_s + self.kv_token_s * num_kv_tokens
        half_growth_s = self.kv_token_s * size / 2
        linear_s = first_s - half_growth_s
        num_iterations = 2 * seconds / (linear_s + math.sqrt(linear_s**2 + 4 * half_growth_s * seconds))
        return max(1, math.ceil(num_iterations - 1e-9))


class Batch:
    """The members of a batch.

    Invariant: `num_kv_tokens` is the number of all members' tokens, except the newest token of each.
    """

    def __init__(self) -> None:
        self.num_kv_tokens = 0
        self.num_iterations = 0
        self._members: dict[Member, None] = {}
        self._leaving: list[tuple[int, int, Member]] = []
        """A heap of members by last iteration. Removed members stay in it."""
        self._runs: Gaps = []
        """Runs as (iterations, seconds of each iteration). A run of 0 iterations is a stall."""
        self._num_dropped_runs = 0

    @property
    def size(self) -> int:
        return len(self._members)

    def __contains__(self, member: Member) -> bool:
        return member in self._members

    def add(self, member: Member, now_s: float) -> None:
        """Add a member, which takes part in the next iteration."""
        member.joined_iteration = self.num_iterations
        member.first_run = self._num_dropped_runs + len(self._runs)
        member.waited_s = now_s - member.left_s
        self.num_kv_tokens += member.num_tokens
        self._members[member] = None
        heapq.heappush(self._leaving, (member.last_iteration, member.number, member))

    def num_iterations_to_first_end(self) -> int:
        """Return how many iterations remain until a member has all tokens. The batch must not be empty."""
        while not self._is_leaving(*self._leaving[0]):
            heapq.heappop(self._leaving)
        return self._leaving[0][0] - self.num_iterations

    def stall(self, seconds: float) -> None:
        """Delay the next token of every member by `seconds`."""
        self._runs.append((0, seconds))

    def advance(self, num_iterations: int, seconds: float) -> list[Member]:
        """Run `num_iterations` iterations, which take `seconds`.

        Returns the members that have all their tokens now.
        """
        self._runs.append((num_iterations, seconds / num_iterations))
        self.num_iterations += num_iterations
        self.num_kv_tokens += num_iterations * self.size
        ended = []
        while self._leaving and self._leaving[0][0] <= self.num_iterations:
            entry = heapq.heappop(self._leaving)
            if self._is_leaving(*entry):
                self.remove(entry[2])
                ended.append(entry[2])
        if len(self._runs) > _MAX_RUNS:
            self._drop_old_runs()
        return ended

    def remove(self, member: Member) -> None:
        """Remove a member, which keeps its tokens and may join again."""
        self._add_gaps(member)
        num_drawn = self.num_iterations - member.joined_iteration
        member.num_tokens += num_drawn
        member.num_left -= num_drawn
        self.num_kv_tokens -= member.num_tokens
        del self._members[member]

    def _add_gaps(self, member: Member) -> None:
        waited_s = member.waited_s
        for num_iterations, seconds in self._runs[member.first_run - self._num_dropped_runs :]:
            if num_iterations == 0:
                waited_s += seconds
                continue
            if waited_s:
                member.gaps.append((1, seconds + waited_s))
                num_iterations, waited_s = num_iterations - 1, 0.0
            if num_iterations:
                member.gaps.append((num_iterations, seconds))

    def num_left_of(self, member: Member) -> int:
        """Return the number of tokens that a member has still to draw."""
        num_drawn = self.num_iterations - member.joined_iteration if member in self else 0
        return member.num_left - num_drawn

    def newest(self) -> Member:
        """Return the newest member, which is preempted first."""
        return max(self._members, key=lambda member: member.number)

    def _is_leaving(self, last_iteration: int, number: int, member: Member) -> bool:
        return member in self and member.last_iteration == last_iteration

    def _drop_old_runs(self) -> None:
        newest = self._num_dropped_runs + len(self._runs)
        oldest = min((member.first_run for member in self._members), default=newest)
        del self._runs[: oldest - self._num_dropped_runs]
        self._num_dropped_runs = oldest


def tpot_s(gaps: Gaps) -> float | None:
    """Return the time per output token of a request, the mean of all its gaps; None if there are no gaps."""
    if not gaps:
        return None
    return sum(number * seconds for number, seconds in gaps) / sum(number for number, _ in gaps)


def tbt_s(gaps: Gaps) -> float | None:
    """Return the TBT of a request with these gaps; None if there are no gaps."""
    if not gaps:
        return None
    num_longest = num_left = math.ceil(LONGEST_SHARE * sum(number for number, _ in gaps))
    sum_s = 0.0
    for number, seconds in sorted(gaps, key=itemgetter(1), reverse=True):
        num_taken = min(number, num_left)
        sum_s += num_taken * seconds
        num_left -= num_taken
        if not num_left:
            break
    return sum_s / num_longest
