"""A running batch of continuous batching, advanced many steps at a time.

While nobody joins or leaves, step i of a run takes `fixed_s + kv_token_s * (num_kv_tokens + i * size)`, so
the time of n steps is a sum in closed form, and so is the number of steps that have begun by a given time.
What a request has waited for each of its tokens is kept as runs of steps, not token by token.

Owns: who is in the batch, how many steps it has made, the times between tokens. Does not know: the clock, why
somebody joins.
"""

import heapq
import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

LONGEST_SHARE = 0.1
"""TBT of a request: the mean of its longest 10% of token gaps (Mooncake, FAST'25)"""
_MAX_RUNS = 4096
Gaps = list[tuple[int, float]]
"""Gaps between tokens, as (number, seconds)."""


@dataclass(slots=True, eq=False)
class Member:
    """One request in the batch. `num_tokens`: with KVCache, `num_left`: still to be drawn, at its joining."""

    number: int
    """Number in order of arrival."""
    num_tokens: int
    num_left: int
    left_s: float = 0.0
    """Time of its latest token before it joined."""
    gaps: Gaps = field(default_factory=list)
    joined_step: int = 0
    first_run: int = 0
    waited_s: float = 0.0

    @property
    def last_step(self) -> int:
        """The step that draws its last token."""
        return self.joined_step + self.num_left


class StepCost(NamedTuple):
    """The cost of a step of a batch as it is: a fixed part, and one for each token of KVCache."""

    fixed_s: float
    kv_token_s: float

    def steps_s(self, num_kv_tokens: int, size: int, num_steps: int) -> float:
        """Seconds of so many steps."""
        num_grown = size * num_steps * (num_steps - 1) / 2
        return num_steps * (self.fixed_s + self.kv_token_s * num_kv_tokens) + self.kv_token_s * num_grown

    def steps_by(self, num_kv_tokens: int, size: int, seconds: float) -> int:
        """How many steps have begun before `seconds` have passed; at least one."""
        first_s = self.fixed_s + self.kv_token_s * num_kv_tokens
        half_growth_s = self.kv_token_s * size / 2
        linear_s = first_s - half_growth_s
        num_steps = 2 * seconds / (linear_s + math.sqrt(linear_s**2 + 4 * half_growth_s * seconds))
        return max(1, math.ceil(num_steps - 1e-9))


class Batch:
    """Invariant: `num_kv_tokens` is the sum over the members, the newest token of each left out."""

    def __init__(self) -> None:
        self.num_kv_tokens = 0
        self.num_steps = 0
        self._members: dict[Member, None] = {}
        self._leaving: list[tuple[int, int, Member]] = []
        """Members by last step; removed ones are still among them."""
        self._runs: Gaps = []
        """(steps, seconds of each); without steps: a stall"""
        self._num_dropped_runs = 0

    @property
    def size(self) -> int:
        return len(self._members)

    def __contains__(self, member: Member) -> bool:
        return member in self._members

    def add(self, member: Member, now_s: float) -> None:
        """Make a member part of the next step."""
        member.joined_step = self.num_steps
        member.first_run = self._num_dropped_runs + len(self._runs)
        member.waited_s = now_s - member.left_s
        self.num_kv_tokens += member.num_tokens
        self._members[member] = None
        heapq.heappush(self._leaving, (member.last_step, member.number, member))

    def num_steps_to_first_end(self) -> int:
        """Return the steps until a member has all tokens. The batch must not be empty."""
        while not self._is_leaving(*self._leaving[0]):
            heapq.heappop(self._leaving)
        return self._leaving[0][0] - self.num_steps

    def stall(self, seconds: float) -> None:
        """Delay the next token of every member."""
        self._runs.append((0, seconds))

    def advance(self, num_steps: int, seconds: float) -> list[Member]:
        """Make so many steps in so many seconds. Returns the members that have all tokens now."""
        self._runs.append((num_steps, seconds / num_steps))
        self.num_steps += num_steps
        self.num_kv_tokens += num_steps * self.size
        ended = []
        while self._leaving and self._leaving[0][0] <= self.num_steps:
            entry = heapq.heappop(self._leaving)
            if self._is_leaving(*entry):
                self.remove(entry[2])
                ended.append(entry[2])
        if len(self._runs) > _MAX_RUNS:
            self._drop_old_runs()
        return ended

    def remove(self, member: Member) -> None:
        """Remove a member with what it has. It may join again."""
        self._add_gaps(member)
        num_drawn = self.num_steps - member.joined_step
        member.num_tokens += num_drawn
        member.num_left -= num_drawn
        self.num_kv_tokens -= member.num_tokens
        del self._members[member]

    def _add_gaps(self, member: Member) -> None:
        waited_s = member.waited_s
        for num_steps, seconds in self._runs[member.first_run - self._num_dropped_runs :]:
            if num_steps == 0:
                waited_s += seconds
                continue
            if waited_s:
                member.gaps.append((1, seconds + waited_s))
                num_steps, waited_s = num_steps - 1, 0.0
            if num_steps:
                member.gaps.append((num_steps, seconds))

    def num_left_of(self, member: Member) -> int:
        """Tokens that a member has still to draw."""
        num_drawn = self.num_steps - member.joined_step if member in self else 0
        return member.num_left - num_drawn

    def newest(self) -> Member:
        """Return the member that is preempted first."""
        return max(self._members, key=lambda member: member.number)

    def _is_leaving(self, last_step: int, number: int, member: Member) -> bool:
        return member in self and member.last_step == last_step

    def _drop_old_runs(self) -> None:
        newest = self._num_dropped_runs + len(self._runs)
        oldest = min((member.first_run for member in self._members), default=newest)
        del self._runs[: oldest - self._num_dropped_runs]
        self._num_dropped_runs = oldest


def tbt_s(gaps: Gaps) -> float | None:
    """Time between tokens of a request; None without gaps."""
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
