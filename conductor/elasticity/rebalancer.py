"""The rebalancer: it changes roles of instances, one at a time, as the load changes (Mooncake, section 10).

    measure    the work that arrives, in instances of each stage (`demand`, `capacity`)
    compare    the share of requests that is served now, with one more prefill and with one more decode
               instance
    decide     whether a change pays: benefit / cost >= rho (BanaServe, section 4.4.1, equation 35)
    follow     the change until it is done, and the share of rejections before and after it

A change must not break an SLO that is met. So the instance's requests must fit on the other instances. A
change is never reversed while load and instances stay the same. When load or instances change, a limited
number of role changes is allowed again.

Owns: the decisions. Does not know: how a role is changed, where figures come from (`survey`), the clock.
"""

import math
from collections import Counter, deque
from dataclasses import replace
from typing import NamedTuple

from conductor.elasticity.capacity import FULL_SHARE, Division, DivisionCapacity, Work
from conductor.elasticity.decisions import Acceptance, Change, Decision, Outcome
from conductor.elasticity.demand import OfferedLoad, Persistence
from conductor.elasticity.moves.batches import InstanceBatch, can_be_emptied
from conductor.performance.model import DecodeCapacity
from conductor.performance.utilisation import Used
from mooncake.messages.workers import InstanceState, Role

_NUM_KEPT = 100
"""The number of latest decisions that are kept."""
_PERIOD_S = 2.0
"""The least seconds between two decisions about roles."""
_SPARE_STRAIN = 0.8
"""The largest strain of a stage after it gives up an instance for the usual gain, `_LEAST_GAIN`.

With more strain afterwards the change must gain twice as much, unless the stage is overloaded already.
"""
_LEAST_GAIN = 0.05
"""The least predicted gain in served requests for a change, as a share of the requests served now."""
_LEAST_BENEFIT = 2.0
"""The least ratio of benefit to cost (rho in equation 35)."""
_LEAST_WINDOW_S = 3.0
"""Seconds for which a load must have been the same before a role changes."""
_FEWEST_ARRIVALS = 10.0
"""The number of arrivals that must have been seen before a role changes."""
_AGAIN_AFTER_S = 60.0
"""Seconds after the decision for a change that failed in which the change's instance is not chosen again."""
_EVALUATED_S = 15.0
"""Seconds before and after a change over which arrivals are compared."""
_OTHERS_AFTER_S = 15.0
"""Seconds after which a changed set of instances counts as a new set. The time is longer than a restart."""
_QUEUE_SHARE = 0.5
"""The share of the TTFT SLO to which other prefill queues may grow when an instance is taken away."""
_LEAST_LEFT_S = 15.0
"""Seconds that the load must be expected to last, as a change and its reversal both take effect late."""
_SAME_LOAD = 1.5
"""The ratio of two amounts of a stage's work below which they count as the same load."""
_TARGET_STRAIN = 0.7
"""The strain at which the desired number of instances is computed."""


class Member(NamedTuple):
    """An instance for the rebalancer: its role, queue and batch."""

    name: str
    role: Role
    state: InstanceState
    may_change: bool
    used: Used | None = None
    queue_s: float = 0.0
    """Predicted seconds of the prompts in the instance's queue."""
    batch: InstanceBatch | None = None
    """The batch of a decode instance; None for a prefill instance."""

    @property
    def takes_requests(self) -> bool:
        """Whether new requests may be placed on the instance."""
        return self.state is InstanceState.SERVING


class State(NamedTuple):
    """The state of the cluster on which the rebalancer decides."""

    members: list[Member]
    load: OfferedLoad | None
    num_changes: int
    """The number of times that the load has changed since the Conductor began."""
    capacity: DecodeCapacity | None
    """The decode capacity of a mean instance; None without a decode instance."""
    ttft_slo_s: float | None
    has_inlining: bool
    num_arrived: int
    """Requests that have arrived since the Conductor began."""
    num_rejected: int
    """Requests that were rejected because of the load since the Conductor began."""

    def serving(self, role: Role) -> list[Member]:
        """Return the serving instances with exactly this role; `Role.BOTH` is a role of its own here."""
        return [member for member in self.members if member.role is role and member.takes_requests]

    @property
    def is_switching(self) -> bool:
        """Whether a role is being changed, by the rebalancer or by an operator."""
        return any(member.state is InstanceState.SWITCHING for member in self.members)

    @property
    def division(self) -> Division:
        """The present numbers of instances by stage.

        Instances with both roles count as decode instances that inline prefills.
        """
        num_both = len(self.serving(Role.BOTH))
        return Division(len(self.serving(Role.PREFILL)), len(self.serving(Role.DECODE)) + num_both)


class Rebalancer:
    """Decides which instance changes its role, and when."""

    def __init__(self) -> None:
        self.decisions: deque[Decision] = deque(maxlen=_NUM_KEPT)
        """The latest decisions, oldest first."""
        self.num_decided: Counter[Role] = Counter()
        """The number of decided changes, by the role after them."""
        self.desired: dict[Role, int] = {}
        """The number of instances of each role that the latest load needs, for autoscalers.

        Bursts do not change the number. It may be larger than the number of registered instances.
        """
        self._persistence = Persistence()
        self._switch_s = 3.0
        """The mean seconds that a change takes."""
        self._acceptance = Acceptance(2 * _EVALUATED_S)
        self._looked_s = -math.inf
        self._num_changes_seen = 0
        self._num_changes_at_decision = -1
        """`_num_changes_seen` at the latest decision; -1 before the first one."""
        self._same: Work | None = None
        """The work for which `_num_left` was set."""
        self._names: frozenset[str] = frozenset()
        """The names of all instances at the time when `_num_left` was set."""
        self._other_names: tuple[frozenset[str], float] = (frozenset(), math.inf)
        """The names of the present instances, and the time at which they began to differ from `_names`.

        The time is infinite if they do not differ.
        """
        self._num_left = 0
        """The number of further changes that are allowed for this load and these instances."""
        self._direction: Role | None = None
        """The new role in the latest change for this load and these instances; None before a change."""

    def is_time(self, now_s: float) -> bool:
        """Return whether `decide` is due: `_PERIOD_S` seconds after its last call."""
        return now_s - self._looked_s >= _PERIOD_S

    def decide(self, state: State, now_s: float) -> Change | None:
        """Decide on a change, and record it in `decisions`. Returns None if no role should change."""
        self._looked_s = now_s
        self._acceptance.note(state.num_arrived, state.num_rejected, now_s)
        self._follow(state, now_s)
        load, capacity = state.load, state.capacity
        if load is None or capacity is None:
            return None
        self._persistence.note(load, state.num_changes > self._num_changes_seen, now_s)
        self._num_changes_seen = state.num_changes
        able = DivisionCapacity(load, capacity, state.has_inlining)
        work = able.work
        if load.window_s >= _LEAST_WINDOW_S and not load.was_burst:
            self.desired = {
                Role.PREFILL: max(1, math.ceil(work.prefill / _TARGET_STRAIN)),
                Role.DECODE: max(1, math.ceil(work.decode / _TARGET_STRAIN)),
            }
        names = frozenset(member.name for member in state.members)
        self._note_instances(names, now_s)
        if state.is_switching or not self._is_known(load):
            return None
        self._renew(work, names, now_s)
        change = self._best(state, able, now_s)
        if change is None or not self._num_left:
            return None
        self._num_left -= 1
        self._direction = change.after
        self._num_changes_at_decision = self._num_changes_seen
        self.num_decided[change.after] += 1
        accepted = self._acceptance.share(now_s - _EVALUATED_S, now_s)
        self.decisions.append(Decision(now_s, change, accepted))
        return change

    def refused(self, why: str) -> None:
        """Record that the latest change was refused for the reason `why`."""
        self.decisions[-1].outcome = Outcome(0.0, note=why)

    def _is_known(self, load: OfferedLoad) -> bool:
        num_arrivals = load.num_requests * load.window_s
        is_seen = load.window_s >= _LEAST_WINDOW_S and num_arrivals >= _FEWEST_ARRIVALS
        return is_seen and not load.was_burst

    # -- which change -------------------------------------------------------------------------------

    def _note_instances(self, names: frozenset[str], now_s: float) -> None:
        """Record the time at which the set of instances began to differ from `_names`."""
        if names == self._names:
            self._other_names = (names, math.inf)
        elif names != self._other_names[0]:
            self._other_names = (names, now_s)

    def _renew(self, work: Work, names: frozenset[str], now_s: float) -> None:
        """Reset the limit of changes if the load has changed, or the instances have changed for good."""
        same, since_s = self._same, self._other_names[1]
        are_others = now_s - since_s >= _OTHERS_AFTER_S
        if same is None or are_others or not all(map(self._is_same, work, same)):
            self._same, self._names, self._direction = work, names, None
            self._num_left = max(2, len(names) // 4)

    def _is_same(self, one: float, other: float) -> bool:
        larger, smaller = max(one, other), min(one, other)
        return larger <= _SAME_LOAD * smaller or larger < 0.2

    def _best(self, state: State, able: DivisionCapacity, now_s: float) -> Change | None:
        options = [self._change(state, able, role, now_s) for role in (Role.PREFILL, Role.DECODE)]
        found = [change for change in options if change is not None]
        return max(found, key=lambda change: change.benefit_s, default=None)

    def _change(self, state: State, able: DivisionCapacity, role: Role, now_s: float) -> Change | None:
        """Return the best change of one instance to this role; None if no change pays or is possible."""
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        if self._direction is other:
            return None  # it would undo the latest change though the load is the same
        division = state.division
        if len(state.serving(other)) < 2:
            return None
        more = 1 if role is Role.PREFILL else -1
        division_after = Division(division.num_prefill + more, division.num_decode - more)
        before, after = self._served(able, division), self._served(able, division_after)
        gain = after / before - 1
        is_spared = able.strain(division_after).of(other) <= _SPARE_STRAIN
        is_short = able.strain(division).of(other) > FULL_SHARE
        if gain < _LEAST_GAIN * (1.0 if is_spared or is_short else 2.0):
            return None
        num_instances, left_s = len(state.members), self._persistence.left_s(able.load.window_s)
        if left_s < _LEAST_LEFT_S or self._is_risky(able.load):
            return None
        benefit_s = gain * (left_s - self._switch_s)
        cost_s = self._switch_s / num_instances
        if benefit_s < _LEAST_BENEFIT * cost_s:
            return None
        member = self._spared(state, other, now_s)
        if member is None:
            return None
        return Change(member.name, other, role, able.work, division, before, after, benefit_s, cost_s)

    def _is_risky(self, load: OfferedLoad) -> bool:
        """Return whether a further change would be risky.

        A further change is risky if this load has already led to a change, has not lasted long, and it is
        unknown how long loads last.
        """
        is_another = self._num_changes_at_decision == self._num_changes_seen
        return is_another and not self._persistence.is_known and load.window_s < _LEAST_LEFT_S

    def _served(self, able: DivisionCapacity, division: Division) -> float:
        """Return the share of the expected requests, from 0 to 1, that a division serves.

        The expected requests are those of the present load, of similar earlier loads, and of earlier loads
        that were too brief for a change. Each load counts in proportion to its duration.
        """
        expected = [(able, able.load.window_s)]
        for past in self._persistence.past:
            earlier = replace(able, load=past.load)
            is_same = all(map(self._is_same, earlier.work, able.work))
            if is_same or past.lasted_s < _LEAST_LEFT_S:
                expected.append((earlier, past.lasted_s))
        num = sum(of.load.num_requests * lasted_s for of, lasted_s in expected)
        num_served = sum(
            of.load.num_requests * lasted_s * of.strain(division).served for of, lasted_s in expected
        )
        return num_served / num

    def _spared(self, state: State, role: Role, now_s: float) -> Member | None:
        """Return the instance of a role that can best be spared; None if there is none.

        Its requests must fit on the other instances. Among several such instances, it is the one with the
        least to move.
        """
        members, failed_s = state.serving(role), now_s - _AGAIN_AFTER_S
        failed = {of.change.instance for of in self.decisions if of.has_failed and of.at_s > failed_s}
        able = [member for member in members if member.may_change and member.name not in failed]
        if role is Role.PREFILL:
            return self._spared_prefill(able, members, state.ttft_slo_s)
        batches = [member.batch for member in state.members if member.batch is not None]
        for member in sorted(able, key=_least_to_lose):
            if member.batch is not None and can_be_emptied(member.batch, batches):
                return member
        return None

    def _spared_prefill(
        self, able: list[Member], members: list[Member], ttft_slo_s: float | None
    ) -> Member | None:
        queue_s = sum(member.queue_s for member in members) / (len(members) - 1)
        if ttft_slo_s is not None and queue_s > _QUEUE_SHARE * ttft_slo_s:
            return None
        return min(able, key=_least_to_lose, default=None)

    # -- what came of it ----------------------------------------------------------------------------

    def _follow(self, state: State, now_s: float) -> None:
        """Record which changes are complete, and the outcomes that are known by now.

        An outcome is known `_EVALUATED_S` seconds after its change.
        """
        members = {member.name: member for member in state.members}
        for decision in self.decisions:
            if decision.outcome is not None:
                continue
            member = members.get(decision.change.instance)
            if decision.done_s is None:
                self._follow_open(decision, member, now_s)
            elif now_s >= decision.done_s + _EVALUATED_S:
                accepted = self._acceptance.share(decision.done_s, now_s)
                decision.outcome = Outcome(decision.done_s - decision.at_s, accepted)

    def _follow_open(self, decision: Decision, member: Member | None, now_s: float) -> None:
        """Record the end of a pending change, if it has ended.

        A change that took too long counts as ended: `conductor.membership.roles` has undone it.
        """
        took_s = now_s - decision.at_s
        if member is None:
            decision.outcome = Outcome(took_s, note="the instance has gone")
        elif member.state is InstanceState.SWITCHING:
            return
        elif member.role is decision.change.after:
            decision.done_s = now_s
            self._switch_s += 0.3 * (took_s - self._switch_s)
        else:
            decision.outcome = Outcome(took_s, note="it was undone")


def _least_to_lose(member: Member) -> tuple[float, float]:
    """Return the sort key of instances to spare, least to lose first.

    The key is the number of KVCache tokens (decode) or the queue in seconds (prefill), then the utilisation.
    """
    used = 0.0 if member.used is None else member.used.utilisation
    if member.batch is None:
        return member.queue_s, used
    return sum(of.num_tokens for of in member.batch.residents), used
