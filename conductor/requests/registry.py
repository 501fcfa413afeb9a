"""The owner of accepted requests. Only this module changes a request's state and pair.

Owns: the accepted requests, the admission queue, the orders that a change of state needs. Does not know:
which pair is chosen, why a request ends, the messages of fronts.
"""

from collections import Counter

from conductor.admission.quotas import Quotas
from conductor.effects import Effect
from conductor.requests.lifecycle import PLACED, RequestState, TrackedRequest
from conductor.requests.migration import TIMEOUT_S, Migration, MigrationStep
from conductor.requests.running import RunningRequests
from conductor.requests.suspicion import Suspicion
from conductor.settings import Limits, PolicySettings, SLOs
from conductor.view.assignments import Assignments
from conductor.view.cluster_view import ClusterView
from conductor.view.decision_stats import DecisionStats, MigrationOutcome, MigrationReason
from conductor.view.instances import Instance, Instances
from conductor.view.migration_costs import MigrationCost
from conductor.view.placement import Placement
from mooncake.messages.migration import PreCopy, TakeOver
from mooncake.messages.pools import Grant
from mooncake.messages.requests import Ref, Request
from mooncake.messages.workers import Abort, Decode, Prefill, Prefilled, Reserve


class Requests:
    """All accepted requests, with their states and pairs.

    Invariants of a request between two calls:

    - It is in `by_id` from `accept` until it ends.
    - It has an assignment exactly if its state is in `PLACED`. Then both instances of its pair have it among
      their `requests`. The prefill instance has it only until prefill has ended.
    - It is in `admission_queue` exactly if its state is QUEUED.
    - It is in `migrating` exactly if it has a migration. Then its state is DECODING. The destination has it
      among its `requests`, too, unless the migration is STRANDED.
    """

    def __init__(
        self, epoch: int, instances: Instances, view: ClusterView, limits: Limits, settings: PolicySettings
    ) -> None:
        self.epoch = epoch
        self.instances, self.view, self.limits = instances, view, limits
        self.stats = DecisionStats()
        self.suspicion = Suspicion(limits.max_attempts)
        self.by_id: dict[str, TrackedRequest] = {}
        self.admission_queue: dict[str, TrackedRequest] = {}
        self.migrating: dict[str, TrackedRequest] = {}
        self.num_released = 0
        """The number of times that a request has left instances."""
        self._assignments = Assignments(view, settings, self.stats)
        self._has_double_check = settings.has_double_check
        self.running = RunningRequests(limits.max_running_requests)
        self.quotas = Quotas()
        self._num_migrations: Counter[bytes] = Counter()
        """The number of migrations in progress from and to each instance.

        A migration whose destination was given up counts at its source only.
        """

    # -- questions ----------------------------------------------------------------------------------

    @property
    def strictest_tbt_slo_s(self) -> float | None:
        """The smallest TBT SLO in seconds of all placed requests; None if no request has one."""
        return self._assignments.strictest_tbt_slo_s

    def slos_in_batch(self, tracked: TrackedRequest) -> SLOs:
        """Return the request's SLOs, with the strictest TBT SLO that may apply in its batch.

        If there are SLO classes, this is the stricter of the request's own TBT SLO and the strictest TBT SLO
        of all placed requests.
        """
        if not self.limits.slo_classes:
            return tracked.slos
        both_s = (tracked.slos.tbt_s, self.strictest_tbt_slo_s)
        return tracked.slos._replace(
            tbt_s=min((tbt_s for tbt_s in both_s if tbt_s is not None), default=None)
        )

    def has_not_begun(self, tracked: TrackedRequest) -> bool:
        """Return whether the request has a pair, but none of its prompt has been computed there."""
        if tracked.state is RequestState.PREFILLING:
            return not (tracked.may_have_begun or self._assignments.has_begun(tracked.placed))
        return tracked.state is RequestState.RESERVING

    def current(self, ref: Ref) -> TrackedRequest | None:
        """Return the placed request whose present attempt is `ref`; None if there is none."""
        tracked = self.by_id.get(ref.request_id)
        return tracked if tracked is not None and tracked.ref == ref and tracked.state in PLACED else None

    def num_migrations(self, instance: Instance) -> int:
        """Return the number of migrations in progress from and to an instance."""
        return self._num_migrations[instance.identity]

    def coming(self, ref: Ref) -> TrackedRequest | None:
        """Return the migrating request whose attempt at its destination will be `ref`; None without one."""
        tracked = self.migrating.get(ref.request_id)
        is_meant = tracked is not None and tracked.migration is not None and tracked.migration.ref == ref
        return tracked if is_meant else None

    # -- a request's steps --------------------------------------------------------------------------

    def new(self, front: bytes, request: Request, now_s: float) -> TrackedRequest:
        """Return a record for a request that a front has submitted. The request is not accepted yet."""
        ref = Ref(self.epoch, request.request_id, 0)
        return TrackedRequest(request, front, self.limits.slos_of(request), ref, now_s, now_s)

    def resumed(self, front: bytes, request: Request, waited_s: float, now_s: float) -> TrackedRequest:
        """Return a record for a request that an earlier Conductor had accepted, as `front` reports.

        `waited_s`: the seconds since the request's submission.
        """
        tracked = self.new(front, request, now_s)
        tracked.submitted_s = now_s - waited_s
        tracked.is_promised, tracked.may_have_begun = True, request.num_output_tokens > 0
        tracked.state = RequestState.RESUMING
        return tracked

    def accept(self, tracked: TrackedRequest) -> None:
        """Add the request to the accepted requests."""
        self.by_id[tracked.request_id] = tracked
        self.running.begin(tracked)

    def enqueue(self, tracked: TrackedRequest) -> None:
        """Add a WAITING request to the admission queue. Idempotent."""
        if tracked.state is not RequestState.QUEUED:
            tracked.move_to(RequestState.QUEUED)
            self.admission_queue[tracked.request_id] = tracked

    def assign(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> Effect:
        """Place the request on the pair of `placement`, as a new attempt.

        Returns the order that asks the decode instance for pages.
        """
        request, prefill, decode = tracked.request, placement.prefill, placement.decode
        self.admission_queue.pop(tracked.request_id, None)
        tracked.ref = tracked.new_ref(self.epoch)
        for instance in (prefill, decode):
            instance.requests[tracked.request_id] = len(request.token_ids)
        tracked.assignment = self._assignments.assign(request, placement, tracked.slos, now_s)
        tracked.move_to(RequestState.RESERVING)
        reserve = Reserve(
            tracked.ref,
            request,
            self.slos_in_batch(tracked).tbt_s,
            may_refuse=self._has_double_check and tracked.may_be_refused,
            shares_cores=decode.shares_cores(prefill),
            alone=self.suspicion.is_suspect(tracked.request_id),
            inline=placement.is_inlined,
        )
        return Effect(decode.identity, reserve)

    def adopt(
        self,
        tracked: TrackedRequest,
        ref: Ref,
        prefill: Instance,
        decode: Instance,
        state: RequestState,
        now_s: float,
    ) -> None:
        """Continue a request, as the attempt `ref`, at the pair to which an earlier Conductor gave it.

        `state` is PREFILLING or DECODING. `prefill` and `decode` are the same instance if the decode instance
        computes the prompt itself, or has begun to decode.
        """
        tracked.ref, tracked.num_attempts = ref, ref.attempt
        tracked.may_have_begun |= prefill is decode
        for instance in (prefill, decode):
            instance.requests[tracked.request_id] = len(tracked.request.token_ids)
        tracked.assignment = self._assignments.adopt(
            tracked.request,
            prefill,
            decode,
            tracked.slos,
            tracked.time_left_s(now_s),
            now_s,
            is_decoded=state is RequestState.DECODING,
        )
        tracked.move_to(state)

    def begin_prefill(self, tracked: TrackedRequest, grant: Grant, now_s: float) -> list[Effect]:
        """Record that the decode instance has granted pages, and return the order to prefill.

        An inlined prompt needs no order: its instance begins on its own.
        """
        tracked.move_to(RequestState.PREFILLING)
        placement, time_left_s = tracked.placed.placement, tracked.time_left_s(now_s)
        num_held_blocks = _num_held_blocks(tracked.request, grant)
        source = self._assignments.order_prefill(tracked.placed, num_held_blocks, time_left_s, now_s)
        num_blocks = placement.num_local_blocks
        if source is not None:
            num_blocks = max(num_blocks, source.num_blocks)
        if placement.is_inlined:
            tracked.may_have_begun = True  # the first token leaves before the Conductor hears of it
            return []
        alone = self.suspicion.is_suspect(tracked.request_id)
        order = Prefill(tracked.ref, tracked.request, grant, time_left_s, source, num_blocks, alone)
        return [Effect(placement.prefill.identity, order)]

    def begin_decode(self, tracked: TrackedRequest, prefilled: Prefilled, now_s: float) -> list[Effect]:
        """Record that prefill has ended, and return the order to decode.

        An inlined prompt needs no order: its instance goes on by itself.
        """
        tracked.move_to(RequestState.DECODING)
        tracked.may_have_begun = True
        self._assignments.end_prefill(tracked.placed, now_s, prefilled.num_cached_tokens)
        placement = tracked.placed.placement
        if placement.is_inlined:
            return []
        placement.prefill.requests.pop(tracked.request_id, None)
        order = Decode(
            tracked.ref,
            prefilled.first_token,
            prefilled.num_cached_tokens,
            prefilled.first_logprobs,
            tracked.time_left_s(now_s),
        )
        return [Effect(placement.decode.identity, order)]

    def release(self, tracked: TrackedRequest, state: RequestState, now_s: float) -> list[Effect]:
        """Make the request wait for another attempt, and take it off its instances.

        Returns the orders that tell these instances to stop. `state` is WAITING or INTERRUPTED.
        """
        effects = self.end_migration(tracked, MigrationOutcome.SOURCE_FAILED)
        effects += self._leave_pair(tracked, now_s)
        tracked.waiting_since_s = now_s
        tracked.move_to(state)
        return effects

    def resume(self, tracked: TrackedRequest, request: Request) -> None:
        """Make an interrupted request wait for a pair. Its output so far becomes part of its prompt."""
        tracked.request = request
        tracked.move_to(RequestState.WAITING)

    def finish(self, tracked: TrackedRequest, num_output_tokens: int, now_s: float) -> list[Effect]:
        """End a request that has all its tokens.

        Returns the order that stops the destination of the request's migration, if there is one.
        """
        effects = self.end_migration(tracked, MigrationOutcome.ENDED)
        self._assignments.end_decode(tracked.placed, now_s, num_output_tokens)
        self._leave_pair(tracked, now_s)
        self.quotas.charge(tracked.request.tenant, num_output_tokens, now_s)
        self._end(tracked, RequestState.FINISHED)
        return effects

    def cut_short(self, tracked: TrackedRequest, state: RequestState, now_s: float) -> list[Effect]:
        """End the request, and return the orders that tell its instances to stop.

        `state` is ABORTED, REJECTED, REFUSED or FAILED.
        """
        effects = self.end_migration(tracked, MigrationOutcome.ENDED)
        effects += self._leave_pair(tracked, now_s)
        self._end(tracked, state)
        return effects

    # -- migrations ---------------------------------------------------------------------------------

    def begin_migration(
        self,
        tracked: TrackedRequest,
        destination: Instance,
        reason: MigrationReason,
        cost: MigrationCost,
        now_s: float,
    ) -> list[Effect]:
        """Reserve a share of `destination` for a request in decode, and order the first copies."""
        assert tracked.migration is None
        share = self._assignments.reserve(tracked.placed, destination, cost.num_bytes)
        destination.requests[tracked.request_id] = share.num_tokens
        deadline_s = now_s + TIMEOUT_S
        tracked.migration = Migration(
            tracked.new_ref(self.epoch),
            share,
            reason,
            now_s,
            deadline_s,
            num_held_blocks=cost.num_held_blocks,
        )
        self.migrating[tracked.request_id] = tracked
        for instance in (share.source, destination):
            self._num_migrations[instance.identity] += 1
        return [Effect(tracked.placed.placement.decode.identity, PreCopy(tracked.ref))]

    def strand(self, tracked: TrackedRequest, outcome: MigrationOutcome) -> list[Effect]:
        """Give up the destination of a migration whose source may have handed the request over already.

        Returns the order that stops the destination.
        """
        migration = tracked.migration
        assert migration is not None
        migration.move_to(MigrationStep.STRANDED)
        migration.outcome = outcome
        return self._leave_destination(tracked, migration)

    def end_migration(self, tracked: TrackedRequest, outcome: MigrationOutcome) -> list[Effect]:
        """End the request's migration without a move, if there is one.

        Returns the order that stops its destination.
        """
        migration, tracked.migration = tracked.migration, None
        if migration is None:
            return []
        self._close(tracked, migration, outcome)
        if migration.step is MigrationStep.STRANDED:
            return []
        return self._leave_destination(tracked, migration)

    def move(self, tracked: TrackedRequest, request: Request, now_s: float) -> list[Effect]:
        """Record that the destination of a migration decodes the request from now on.

        Returns the order to the destination to take the request over.

        Args:
            tracked: The request that the source has handed over.
            request: The request with its whole output so far.
            now_s: The time.
        """
        migration, tracked.migration = tracked.migration, None
        assert migration is not None
        assert migration.step is MigrationStep.HANDING_OVER
        self._close(tracked, migration, MigrationOutcome.MOVED)
        self.stats.migrations.seconds += now_s - migration.began_s
        num_recomputed_tokens = max(0, len(request.token_ids) - migration.num_loaded_tokens)
        self.stats.migrations.num_recomputed_tokens += num_recomputed_tokens
        placement = tracked.placed.placement
        for source in (placement.prefill, placement.decode):
            source.requests.pop(tracked.request_id, None)
        if placement.decode.emptying is not None:
            placement.decode.emptying.num_moved += 1
        destination = migration.destination
        self._uncount(destination.instance)
        destination.instance.requests[tracked.request_id] = destination.num_tokens
        self._assignments.move(tracked.placed, destination, now_s)
        self.num_released += 1
        tracked.ref, tracked.request = migration.ref, request
        return [Effect(destination.instance.identity, TakeOver(migration.ref, request))]

    def _close(self, tracked: TrackedRequest, migration: Migration, outcome: MigrationOutcome) -> None:
        """Remove a migration that has ended, and count it."""
        del self.migrating[tracked.request_id]
        self._uncount(migration.destination.source)
        migration.outcome = migration.outcome or outcome
        self.stats.migrations.num_ended[migration.reason, migration.outcome] += 1
        block_size = migration.destination.instance.registration.layout.block_size
        num_copied_blocks = max(0, migration.num_loaded_tokens // block_size - migration.num_held_blocks)
        self.stats.migrations.num_copied_bytes += num_copied_blocks * self.view.block_bytes

    def _uncount(self, instance: Instance) -> None:
        """Decrement the number of migrations from or to an instance."""
        self._num_migrations[instance.identity] -= 1
        if not self._num_migrations[instance.identity]:
            del self._num_migrations[instance.identity]

    def _leave_destination(self, tracked: TrackedRequest, migration: Migration) -> list[Effect]:
        instance = migration.destination.instance
        self._uncount(instance)
        self._assignments.unreserve(migration.destination)
        self.num_released += 1
        instance.requests.pop(tracked.request_id, None)
        is_alive = self.instances.by_identity(instance.identity) is not None
        return [Effect(instance.identity, Abort(migration.ref))] if is_alive else []

    # -- ends ---------------------------------------------------------------------------------------

    def _end(self, tracked: TrackedRequest, state: RequestState) -> None:
        tracked.move_to(state)
        del self.by_id[tracked.request_id]
        self.admission_queue.pop(tracked.request_id, None)
        self.running.end(tracked)
        if state is RequestState.REJECTED:
            self.quotas.refund(tracked.request.tenant, tracked.num_charged_tokens)
        self.suspicion.request_ended(tracked.request_id, has_finished=state is RequestState.FINISHED)

    def _leave_pair(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Take the request off its instances. Does nothing if it has no pair.

        Returns the orders that tell the living instances to stop.
        """
        assignment, tracked.assignment = tracked.assignment, None
        if assignment is None:
            return []
        self._assignments.release(assignment, now_s)
        self.num_released += 1
        names = {assignment.placement.prefill.name, assignment.placement.decode.name}
        alive = [instance for name in sorted(names) if (instance := self.instances.get(name)) is not None]
        return [self._stopped(tracked, instance) for instance in alive]

    @staticmethod
    def _stopped(tracked: TrackedRequest, instance: Instance) -> Effect:
        instance.requests.pop(tracked.request_id, None)
        return Effect(instance.identity, Abort(tracked.ref))


def _num_held_blocks(request: Request, grant: Grant) -> int:
    """Return the number of the prompt's leading blocks that the decode instance holds already.

    The grant has no pages for these blocks.
    """
    missing = [page.block_index for page in grant.pages]
    return min([*missing, len(request.block_keys)])
