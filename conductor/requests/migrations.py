"""Migrations: running requests move from one decode instance to another (Llumnix' staged pre-copy).

The messages of a migration, with C for the Conductor:

    C -> source PreCopy, -> PreCopied       the source stores the request's full blocks
    C -> destination Prepare, -> Prepared   the destination fetches and loads them
    ... again, until few tokens are lacking (`step_behind_copies`), `MAX_ROUNDS` times at most ...
    C -> source HandOver, -> HandedOver     the request leaves the source's batch
    C -> destination TakeOver               its destination decodes it from now on

Owns: which orders follow which answers, and the end of a migration. Does not know: why a request moves, the
steps of requests that do not move (`conductor.requests.worker_reports`).
"""

import math
from collections.abc import Mapping

from conductor.effects import Effect
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.migration import MAX_ROUNDS, TIMEOUT_S, Migration, MigrationStep, step_behind_copies
from conductor.requests.registry import Requests
from conductor.settings import PolicySettings
from conductor.view.decision_stats import MigrationOutcome, MigrationReason
from conductor.view.instances import Instance
from conductor.view.migration_costs import migration_cost, num_tokens_so_far
from conductor.view.placement import num_tokens_held
from mooncake.messages.migration import HandOver, PreCopied, PreCopy, Prepare, Prepared
from mooncake.messages.operators import Migrate, Migrates
from mooncake.messages.workers import InstanceState, Role

RETRY_AFTER_S = 5.0
"""Seconds in which an instance that has refused a request is not chosen for this request again."""


class Migrations:
    """Moves requests of the registry between decode instances."""

    def __init__(self, requests: Requests, settings: PolicySettings) -> None:
        self._requests, self._view, self._limits = requests, requests.view, requests.limits
        self._most_at_once = settings.mixed_chunk_tokens
        """The most tokens that a destination computes again in one iteration."""

    # -- questions ----------------------------------------------------------------------------------

    @property
    def in_progress(self) -> Mapping[str, TrackedRequest]:
        """The requests that migrate, by id."""
        return self._requests.migrating

    def may_move(self, tracked: TrackedRequest) -> bool:
        """Return whether the request can leave its instance now. A request that is not in decode cannot."""
        return not self._why_it_stays(tracked)

    def best_destination(self, tracked: TrackedRequest, now_s: float) -> Instance | None:
        """Return the best instance to which a request can move: the one with the least predicted TBT.

        Only instances with a batch slot and device pages of their own for the request count. An instance that
        has refused the request in the last `RETRY_AFTER_S` seconds does not count. An instance that would
        miss the TBT SLO counts only if the source misses the SLO by more.

        None if no instance is left, or if the request may not move.
        """
        if not self.may_move(tracked):
            return None
        most_s = self._most_tbt_s(tracked)
        num_tokens = num_tokens_so_far(self._view, tracked.request, tracked.placed, now_s)
        best, best_s = None, math.inf
        for instance in self._requests.instances.serving(Role.DECODE):
            tbt_s = self._next_tbt_s(instance, tracked)
            if tbt_s >= best_s or tbt_s > most_s or self._why_not_there(tracked, instance):
                continue
            refused_s = tracked.refused_moves.get(instance.identity, -math.inf)
            if now_s - refused_s >= RETRY_AFTER_S and self._has_room(instance, num_tokens):
                best, best_s = instance, tbt_s
        return best

    def _most_tbt_s(self, tracked: TrackedRequest) -> float:
        """Return the largest TBT in seconds that a destination of the request may have."""
        slo_s = self._requests.slos_in_batch(tracked).tbt_s
        if slo_s is None:
            return math.inf
        slot, loads = tracked.placed.decode_slot, self._view.loads
        present_s = self._view.tbt_s(slot, loads.batch_size.item(slot), loads.num_kv_tokens.item(slot))
        return max(slo_s, present_s)

    def _why_it_stays(self, tracked: TrackedRequest) -> str:
        if tracked.state is not RequestState.DECODING:
            return "it is not decoded"
        if tracked.migration is not None:
            return "it migrates already"
        if self._requests.suspicion.is_suspect(tracked.request_id):
            return "it may have ended an instance, and is computed alone"
        if self._requests.num_migrations(tracked.placed.placement.decode) >= self._limits.max_migrations:
            return f"{tracked.decode} has {self._limits.max_migrations} migrations, the limit"
        return _why_not_at(tracked.placed.placement.decode)

    def _why_not_there(self, tracked: TrackedRequest, destination: Instance) -> str:
        name = destination.name
        if name == tracked.decode:
            return f"it is decoded by {name}"
        if destination.state is not InstanceState.SERVING:
            return f"{name} is {destination.state.value}"
        if destination.role is Role.PREFILL:
            return f"{name} does not decode"
        if not destination.can_hold(num_tokens_held(tracked.request, Role.DECODE), Role.DECODE):
            return f"the KVCache of {name} cannot hold it"
        if self._requests.num_migrations(destination) >= self._limits.max_migrations:
            return f"{name} has {self._limits.max_migrations} migrations, the limit"
        return _why_not_at(destination)

    def _next_tbt_s(self, instance: Instance, tracked: TrackedRequest) -> float:
        view, slot = self._view, self._view.slot_of(instance.name)
        assert slot is not None
        iteration_s = view.next_iteration_s.item(slot) + tracked.placed.num_tokens * view.next_token_s.item(
            slot
        )
        return iteration_s * view.next_delay.item(slot)

    def _has_room(self, instance: Instance, num_tokens: int) -> bool:
        loads, slot = self._view.loads, self._view.slot_of(instance.name)
        assert slot is not None
        if loads.batch_size.item(slot) >= loads.max_batch.item(slot):
            return False
        heartbeat, num_blocks = instance.heartbeat, instance.registration.layout.num_blocks(num_tokens)
        if heartbeat is None:
            return True
        return num_blocks + instance.num_pages_at_helper <= heartbeat.num_free_device_pages

    # -- beginning ----------------------------------------------------------------------------------

    def begin(
        self, tracked: TrackedRequest, destination: Instance, reason: MigrationReason, now_s: float
    ) -> list[Effect]:
        """Begin to move a request, and return the orders; none if the request cannot move there.

        Args:
            tracked: A request that is being decoded.
            destination: The instance to which it moves.
            reason: The reason under which the migration is counted.
            now_s: The time.
        """
        if not self.may_move(tracked) or self._why_not_there(tracked, destination):
            return []
        cost = migration_cost(self._view, tracked.request, tracked.placed, destination, now_s)
        return self._requests.begin_migration(tracked, destination, reason, cost, now_s)

    def on_migrate(self, sender: bytes, order: Migrate, now_s: float) -> list[Effect]:
        """Begin to move a request as an operator has ordered, and return the answer and the orders."""
        by_id = self._requests.by_id
        tracked = by_id.get(order.request_id) or by_id.get(f"{order.request_id}-0")
        if tracked is None:
            return [Effect(sender, Migrates(order.order, refusal="no such request is running"))]
        source, refusal = tracked.decode or "", self._why_it_stays(tracked)
        destination: Instance | None = None
        if not refusal and order.instance is None:
            destination = self.best_destination(tracked, now_s)
            refusal = "" if destination is not None else "no other decode instance has room for it"
        elif not refusal and order.instance is not None:
            destination = self._requests.instances.get(order.instance)
            if destination is None:
                refusal = self._requests.instances.why_unknown(order.instance)
            else:
                refusal = self._why_not_there(tracked, destination)
        if refusal or destination is None:
            return [Effect(sender, Migrates(order.order, source, refusal=refusal))]
        effects = self.begin(tracked, destination, MigrationReason.BY_HAND, now_s)
        return [*effects, Effect(sender, Migrates(order.order, source, destination.name))]

    # -- what workers say ---------------------------------------------------------------------------

    def on_pre_copied(self, tracked: TrackedRequest, pre_copied: PreCopied, now_s: float) -> list[Effect]:
        """Return the next order of a migration whose source has stored full blocks in its pool.

        The order goes to the destination (load the blocks), or to the source (hand the request over, or store
        one more block when it is full): see `step_behind_copies`. The migration of a suspect ends instead.
        """
        migration = tracked.migration
        if migration is None or migration.step is not MigrationStep.COPYING:
            return []
        if self._requests.suspicion.is_suspect(tracked.request_id):
            return self._requests.end_migration(tracked, MigrationOutcome.CALLED_OFF)
        migration.num_output_tokens = len(pre_copied.output)
        num_lacking = (
            tracked.request.num_prompt_tokens + migration.num_output_tokens - migration.num_loaded_tokens
        )
        step = step_behind_copies(
            num_lacking, migration.num_rounds, self._block_size, has_waited=migration.has_waited
        )
        if step is MigrationStep.HANDING_OVER:
            return self._hand_over(tracked, migration, now_s)
        source = tracked.placed.placement.decode
        if step is MigrationStep.COPYING:
            migration.has_waited = True
            num_tokens = migration.num_loaded_tokens + self._block_size
            return [Effect(source.identity, PreCopy(tracked.ref, num_tokens))]
        migration.move_to(MigrationStep.PREPARING)
        prepare = Prepare(
            migration.ref,
            tracked.request.continued(pre_copied.output, self._block_size),
            source.registration.shards,
            max(0.0, migration.deadline_s - now_s),
            self._requests.slos_in_batch(tracked).tbt_s,
        )
        return [Effect(migration.destination.instance.identity, prepare)]

    def on_prepared(self, tracked: TrackedRequest, prepared: Prepared, now_s: float) -> list[Effect]:
        """Order the source to copy another round, or to hand over after the last round.

        If the destination lacks many tokens, the migration ends: blocks found no room in the pool of source
        or destination. The destination would compute these tokens again, and that would pause the stream.
        """
        migration = tracked.migration
        if migration is None or migration.step is not MigrationStep.PREPARING:
            return []
        migration.num_rounds += 1
        migration.num_loaded_tokens = prepared.num_tokens
        num_tokens = tracked.request.num_prompt_tokens + migration.num_output_tokens
        if num_tokens - prepared.num_tokens > max(self._most_at_once, 2 * self._block_size):
            return self.end_refused(tracked, now_s)
        if migration.num_rounds >= MAX_ROUNDS:
            return self._hand_over(tracked, migration, now_s)
        migration.move_to(MigrationStep.COPYING)
        return [Effect(tracked.placed.placement.decode.identity, PreCopy(tracked.ref))]

    def _hand_over(self, tracked: TrackedRequest, migration: Migration, now_s: float) -> list[Effect]:
        migration.move_to(MigrationStep.HANDING_OVER)
        migration.deadline_s = now_s + TIMEOUT_S
        return [Effect(tracked.placed.placement.decode.identity, HandOver(tracked.ref))]

    def on_handed_over(self, tracked: TrackedRequest, output: list[int], now_s: float) -> list[Effect] | None:
        """Order the destination to decode a request that its source has handed over.

        Returns:
            The order to take the request over. None if no destination may decode it: then the caller must
            place the request again.
        """
        migration = tracked.migration
        if migration is None or migration.step is not MigrationStep.HANDING_OVER:
            return None
        if self._requests.suspicion.is_suspect(tracked.request_id):
            migration.outcome = MigrationOutcome.CALLED_OFF
            return None
        return self._requests.move(tracked, tracked.request.continued(output, self._block_size), now_s)

    @property
    def _block_size(self) -> int:
        layout = self._view.layout
        assert layout is not None
        return layout.block_size

    # -- ends ---------------------------------------------------------------------------------------

    def end_refused(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """End a migration whose destination has no room or has failed. No failed attempt is counted.

        If the hand-over was ordered, only the destination is given up, and `HandedOver` is awaited.
        """
        assert tracked.migration is not None
        tracked.refused_moves[tracked.migration.destination.instance.identity] = now_s
        return self._give_up(tracked, MigrationOutcome.REFUSED)

    def lose(self, lost: list[Instance]) -> list[Effect]:
        """End the migrations to lost instances. Returns the orders that follow."""
        outcome = MigrationOutcome.DESTINATION_LOST
        return [effect for tracked in self._to(lost) for effect in self._give_up(tracked, outcome)]

    def call_off(self, instance: Instance) -> list[Effect]:
        """End the migrations to an instance that takes no more requests.

        Migrations whose hand-over was ordered are not ended.
        """
        return [
            effect
            for tracked in self._to([instance])
            if tracked.migration is not None and not tracked.migration.has_ordered_hand_over
            for effect in self._requests.end_migration(tracked, MigrationOutcome.CALLED_OFF)
        ]

    def end_late(self, now_s: float) -> tuple[list[Effect], list[TrackedRequest]]:
        """End the migrations past their deadline whose hand-over was not ordered yet.

        Returns:
            The effects, and the late requests whose hand-over was ordered. The caller must place these again,
            as their sources may have stopped decoding them.
        """
        effects, stopped = list[Effect](), list[TrackedRequest]()
        for tracked in list(self._requests.migrating.values()):
            assert tracked.migration is not None
            if tracked.migration.deadline_s > now_s:
                continue
            if tracked.migration.has_ordered_hand_over:
                tracked.migration.outcome = tracked.migration.outcome or MigrationOutcome.LATE
                stopped.append(tracked)
            else:
                tracked.refused_moves[tracked.migration.destination.instance.identity] = now_s
                effects += self._requests.end_migration(tracked, MigrationOutcome.LATE)
        return effects, stopped

    def _to(self, instances: list[Instance]) -> list[TrackedRequest]:
        return [
            tracked
            for tracked in self._requests.migrating.values()
            if tracked.migration is not None and tracked.migration.destination.instance in instances
        ]

    def _give_up(self, tracked: TrackedRequest, outcome: MigrationOutcome) -> list[Effect]:
        """Give up a migration, while its source goes on decoding.

        If the source may have stopped already, only the destination is given up, and `HandedOver` is awaited.
        """
        assert tracked.migration is not None
        if tracked.migration.step is MigrationStep.STRANDED:
            return []
        if tracked.migration.step is MigrationStep.HANDING_OVER:
            return self._requests.strand(tracked, outcome)
        return self._requests.end_migration(tracked, outcome)


def _why_not_at(instance: Instance) -> str:
    """Return why no request can move from or to an instance; empty if requests can."""
    if instance.registration.can_migrate:
        return ""
    return f"requests of {instance.name} do not move: {instance.registration.engine} decodes them"
