"""The control loop of elasticity: it moves requests, changes roles and moves modules by rules.

Requests move where an SLO would be missed. Roles change where a stage lacks an instance. While no request
moves and no role changes, modules may move between instances of one host.

Owns: when the rules are asked, and the orders that follow. Does not know: the rules themselves, how a request
moves (`conductor.requests.migrations`), how an instance changes its role (`conductor.membership.roles`), how
modules move (`conductor.membership.modules`).
"""

import math
from collections import Counter
from collections.abc import Iterator

from conductor.effects import Effect
from conductor.elasticity.demand import Demand
from conductor.elasticity.devices import devices_by_host
from conductor.elasticity.modules import Kind, ModuleMove, Thresholds, plan
from conductor.elasticity.moves.batches import InstanceBatch
from conductor.elasticity.moves.defragmentation import defragment
from conductor.elasticity.moves.limits import Move, RecentMoves
from conductor.elasticity.moves.priorities import keep_headroom
from conductor.elasticity.moves.relief import relieve
from conductor.elasticity.rebalancer import Rebalancer, State
from conductor.elasticity.survey import Survey, answer_of
from conductor.membership.modules import Modules, place_of
from conductor.membership.roles import Roles
from conductor.requests.lifecycle import TrackedRequest
from conductor.requests.migrations import Migrations
from conductor.requests.registry import Requests
from conductor.settings import PolicySettings
from mooncake.messages.costs import prefill_quantities
from mooncake.messages.migration import LayerRange, ModulesPart
from mooncake.messages.workers import InstanceState

RULES = (relieve, keep_headroom, defragment)
"""The rules of moves, the most urgent first. They are asked only while `Survey.may_need_moves` says so."""

THRESHOLDS = Thresholds()
"""The parameters of module moves."""
MODULES_PERIOD_S = 10.0
"""Seconds between two plans of module moves. In this time new heartbeats arrive."""
MODULES_AGAIN_S = 60.0
"""Seconds after which an owner may get another order of one kind: to give modules, or to take them back."""

OVERLOADED = 429
"""The HTTP status of rejections because of the load. Only such rejections count as unserved demand."""


class Elasticity:
    """The component that applies the rules of elasticity to the registry's cluster.

    Args:
        requests: The registry.
        migrations: The component that moves requests.
        roles: The component that changes roles.
        modules: The component that moves modules.
        settings: The settings that tell which of these three are on.
    """

    def __init__(
        self,
        requests: Requests,
        migrations: Migrations,
        roles: Roles,
        modules: Modules,
        settings: PolicySettings,
    ) -> None:
        self._requests, self._migrations, self._roles, self._modules = requests, migrations, roles, modules
        self._settings, self._view, self._instances = settings, requests.view, requests.instances
        self._survey = Survey(requests, migrations, modules)
        self._recent = RecentMoves()
        self.demand = Demand()
        self.rebalancer = Rebalancer() if settings.has_rebalancing else None
        self._num_arrived = 0
        self._modules_looked_s = -math.inf
        self._ordered_s: dict[tuple[str, bool], float] = {}
        """The time of the latest order, by the owner's name and by whether the modules return."""

    # -- what happens -------------------------------------------------------------------------------

    def submitted(self, tracked: TrackedRequest, now_s: float, num: int = 1) -> None:
        """Count a request of a client after it was placed, queued or rejected.

        A request without a pair adds no work if it would be late even on an idle instance.

        `num` is the number of an answer's choices that were rejected together, all like `tracked`.
        """
        if self.rebalancer is None:
            return
        self._num_arrived += num
        request, ttft_slo_s = tracked.request, tracked.slos.ttft_s
        if tracked.assignment is not None:
            prefill_s = tracked.assignment.placement.prediction.prefill_s
        else:
            prefill_s = self._prefill_s(tracked)
            if ttft_slo_s is not None and prefill_s > ttft_slo_s:
                return
        max_tokens = request.sampling.max_tokens
        for _ in range(num):
            self.demand.arrived(request.num_prompt_tokens, max_tokens, prefill_s, now_s)

    def _prefill_s(self, tracked: TrackedRequest) -> float:
        """Return the mean predicted prefill seconds of an unplaced request.

        The longest stored prefix of its prompt is assumed to be reused.
        """
        costs, layout = self._view.mean_prefill_costs(), self._view.layout
        if costs is None or layout is None:
            return 0.0
        request = tracked.request
        held = self._view.prefixes.match(request.block_keys).num_blocks
        num_tokens = len(request.token_ids)
        num_cached = min(num_tokens - 1, int(held.max(initial=0)) * layout.block_size)
        return costs.seconds(*prefill_quantities(num_tokens - num_cached, num_cached))

    def finished(self, tracked: TrackedRequest, num_output_tokens: int, now_s: float) -> None:
        """Record the length in tokens of an answer that has ended."""
        if self.rebalancer is not None and tracked.placed.decode_began_s is not None:
            self.demand.finished(answer_of(tracked, num_output_tokens, now_s))

    # -- as time passes -----------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Return the orders to move requests, change roles and move modules.

        The caller should call it about twice a second.
        """
        effects = self._move(now_s) if self._settings.moves_requests else []
        if self.rebalancer is not None:
            effects += self._rebalance(self.rebalancer, now_s)
            if self._settings.moves_modules and not effects:
                effects += self._move_modules(now_s)
        return effects

    def _move(self, now_s: float) -> list[Effect]:
        self._recent.forget(now_s)
        if not self._survey.may_need_moves():
            return []
        batches = self._recent.settled(self._survey.batches(now_s), now_s)
        moving = {instance.name for instance in self._instances if place_of(instance).is_moving}
        batches = [batch for batch in batches if batch.instance not in moving]
        moves = list(self._wanted(batches))
        effects = []
        for move in self._recent.within(moves, self._in_flight()):
            tracked, instance = self._requests.by_id[move.request_id], self._instances.get(move.destination)
            assert instance is not None
            if begun := self._migrations.begin(tracked, instance, move.reason, now_s):
                effects += begun
                self._recent.note(move, now_s)
        return effects

    def _wanted(self, batches: list[InstanceBatch]) -> Iterator[Move]:
        """Yield the moves that the rules ask for.

        An instance takes part in the moves of one rule only, as all rules see the batches as they are now.
        """
        taken: set[str] = set()
        for rule in RULES:
            for move in rule([batch for batch in batches if batch.instance not in taken]):
                taken |= {move.source, move.destination}
                yield move

    def _in_flight(self) -> Counter[str]:
        return Counter(tracked.decode or "" for tracked in self._requests.migrating.values())

    def _rebalance(self, rebalancer: Rebalancer, now_s: float) -> list[Effect]:
        if not rebalancer.is_time(now_s):
            return []
        change = rebalancer.decide(self._state(now_s), now_s)
        if change is None:
            return []
        instance = self._instances.get(change.instance)
        assert instance is not None
        if why_not := self._roles.why_not(instance, change.after):
            rebalancer.refused(why_not)
            return []
        return self._roles.switch(instance, change.after, now_s)

    def _move_modules(self, now_s: float) -> list[Effect]:
        """Return the order to move modules of one instance to a helper, or back.

        There is no order while a request or a module moves, or a role changes.
        """
        if now_s - self._modules_looked_s < MODULES_PERIOD_S or self._requests.migrating:
            return []
        if any(of.state is InstanceState.SWITCHING or place_of(of).is_moving for of in self._instances):
            return []
        self._modules_looked_s = now_s
        for devices in devices_by_host(self._view, self._instances, self._modules):
            for move in plan(devices, THRESHOLDS):
                if effects := self._order(move, now_s):
                    return effects
        return []

    def _order(self, move: ModuleMove, now_s: float) -> list[Effect]:
        owner, helper = self._instances.get(move.owner), self._instances.get(move.helper)
        assert owner is not None
        assert helper is not None
        order = move.owner, move.kind is None
        if now_s - self._ordered_s.get(order, -math.inf) < MODULES_AGAIN_S:
            return []
        num_layers = owner.registration.layout.num_layers
        layers = LayerRange(num_layers - move.num, num_layers) if move.kind is Kind.LAYERS else None
        part = ModulesPart(move.num if move.kind is Kind.HEADS else 0, layers)
        if self._modules.why_not(owner, helper, part):
            return []
        self._ordered_s[order] = now_s
        return self._modules.order(owner, helper, now_s, part)

    def _state(self, now_s: float) -> State:
        tbt_slo_s = self._requests.strictest_tbt_slo_s or self._requests.limits.tbt_slo_s
        batches = self._survey.batches(now_s)
        load = self.demand.load(self._survey.running(now_s), now_s)
        capacity = self._survey.capacity(batches, tbt_slo_s)
        if load is not None and capacity is not None:
            self._view.full_batch_token_s = 1 / capacity.tokens_per_s(load.mean_kv_tokens)
        return State(
            self._survey.members(batches, now_s),
            load,
            self.demand.num_changes,
            capacity,
            self._requests.limits.ttft_slo_s,
            self._settings.has_inlining,
            self._num_arrived,
            sum(
                number
                for reason, number in self._requests.stats.num_rejections.items()
                if reason.status == OVERLOADED
            ),
        )
