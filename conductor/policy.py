"""The Conductor: it takes a message and the time, and returns the messages to send (Mooncake, section 3).

The same state and the same input give the same output. No IO, no clock, no torch: the live service and a
simulator use the same object.

Owns: which component reacts to which message, ticks. Does not know: sockets, the text of tokens, how the
components decide.
"""

from collections import Counter
from collections.abc import Mapping

from conductor.admission.overload import Admission
from conductor.admission.quotas import Quotas
from conductor.effects import Effect, ToConductor
from conductor.elasticity.control import Elasticity
from conductor.fronts import Fronts
from conductor.membership.emptying import Emptier
from conductor.membership.joining import Joining
from conductor.membership.leaving import Leaving
from conductor.membership.losses import Losses
from conductor.membership.modules import Modules
from conductor.membership.operators import Operators
from conductor.membership.roles import Roles
from conductor.replication.contexts import Contexts
from conductor.replication.copies import Replication
from conductor.replication.evacuation import Evacuation
from conductor.requests.endings import Endings
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.migrations import Migrations
from conductor.requests.placer import Placer
from conductor.requests.registry import Requests
from conductor.requests.resumption import Resumption
from conductor.requests.worker_reports import WorkerReports
from conductor.scheduling.native import new_scheduler
from conductor.settings import Limits, PolicySettings
from conductor.view.cluster_view import ClusterView
from conductor.view.decision_stats import DecisionStats
from conductor.view.instances import Instance, Instances
from conductor.view.placement import why_too_large
from conductor.view.rejection import Reason
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import (
    Accepted,
    Cancel,
    Continue,
    DropContext,
    FrontHello,
    InFlight,
    KeepContext,
    Resume,
    Submit,
    Unknown,
)
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.operators import ChangeRole, Drain, ListInstances, Migrate, MoveModules
from mooncake.messages.workers import (
    STAGES,
    Finished,
    FromWorker,
    HeartbeatAck,
    Leave,
    Register,
    Retire,
    Returning,
)


class Conductor:
    """The policy of the active Conductor.

    Args:
        epoch: The number of this Conductor's life, larger than that of any earlier Conductor.
        fingerprint: The model's fingerprint. Instances and fronts with a different fingerprint are refused.
        limits: The limits of requests and of waiting times.
        settings: The settings of decisions.
        profiled: Measured costs of prefill and of decode to start with; None for generic costs.
        profiled_device: The device on which the costs were measured. Instances on other devices are refused.
            If None, instances on any device are accepted.
    """

    def __init__(
        self,
        epoch: int,
        fingerprint: str,
        limits: Limits,
        settings: PolicySettings | None = None,
        profiled: tuple[Costs, Costs] | None = None,
        profiled_device: str | None = None,
    ) -> None:
        settings = settings or PolicySettings()
        self.limits = limits
        self.instances = Instances(settings)
        self.view = ClusterView(settings, profiled)
        self.prefixes = self.view.prefixes
        self._requests = Requests(epoch, self.instances, self.view, limits, settings)
        self._admission = Admission(self.view, settings.overload)
        self._endings = Endings(self._requests, self._admission)
        scheduler = new_scheduler(self.view, settings)
        self._placer = Placer(self._requests, scheduler, self._admission, self._endings)
        self.migrations = Migrations(self._requests, settings)
        self._reports = WorkerReports(
            self._requests, self._placer, self._endings, self._admission, self.migrations
        )
        self._resumption = Resumption(self._requests, self._placer, self._reports)
        self._fronts = Fronts(epoch, fingerprint, self.instances, self.view)
        self.contexts = Contexts(self.prefixes, self.instances)
        self.replication = (
            Replication(self.view, settings.replication)
            if settings.replication is not None and settings.fetches_prefixes
            else None
        )
        self.evacuation = Evacuation(self.view, self.contexts, self.replication)
        self._emptier = emptier = Emptier(self._requests, self._placer, self.migrations)
        self._modules = Modules(epoch, self.instances, self.view, self._fronts)
        self.roles = Roles(self._requests, self._placer, emptier, self._fronts, self._modules)
        self._leaving = Leaving(
            self._requests, emptier, self.evacuation, self.roles, self._fronts, self._modules
        )
        self._operators = Operators(
            epoch, self.instances, self._leaving, self.roles, self.migrations, self._modules
        )
        self._losses = Losses(self._requests, self._reports, self._resumption, self.roles, self._fronts)
        self._joining = Joining(
            fingerprint,
            profiled_device,
            self._fronts,
            self._requests,
            self._placer,
            self._reports,
            self._losses,
            self._resumption,
            self.roles,
        )
        self.elasticity = Elasticity(self._requests, self.migrations, self.roles, self._modules, settings)
        self._last_tick_s: float | None = None

    # -- what telemetry reads -----------------------------------------------------------------------

    @property
    def requests(self) -> Mapping[str, TrackedRequest]:
        """Accepted requests that have not ended, by id."""
        return self._requests.by_id

    @property
    def num_open(self) -> int:
        """The number of accepted requests that have not ended."""
        return len(self.requests)

    @property
    def num_queued(self) -> int:
        """The length of the admission queue."""
        return len(self._requests.admission_queue)

    @property
    def versions(self) -> dict[str, Counter[int]]:
        """The number of peers by their kind, and by the protocol version that is spoken with them."""
        instances = Counter(instance.version for instance in self.instances)
        return {"front": Counter(self._fronts.versions), "instance": instances}

    @property
    def quotas(self) -> Quotas:
        """The tokens that tenants have left of their quotas."""
        return self._requests.quotas

    @property
    def stats(self) -> DecisionStats:
        """Counts of decisions, and the errors of their predictions."""
        return self._requests.stats

    # -- events -------------------------------------------------------------------------------------

    def handle(self, sender: bytes, message: ToConductor, now_s: float) -> list[Effect]:
        """Handle one message of a peer, and return the messages to send."""
        effects = self._react(sender, message, now_s) + self._settle(now_s)
        return effects + self._placer.retry_queued(now_s)

    def _settle(self, now_s: float) -> list[Effect]:
        """Continue with instances that drain or switch their role.

        An instance without requests then leaves, or gets its new role.
        """
        if not self.instances.emptying:
            return []
        return self._emptier.retry(now_s) + self.roles.settle(now_s) + self._leaving.settle()

    def _react(self, sender: bytes, message: ToConductor, now_s: float) -> list[Effect]:
        match message:
            case FrontHello():
                return [self._on_hello(sender, message, now_s)]
            case InFlight(request_ids):
                return self._on_in_flight(sender, request_ids, now_s)
            case Submit():
                return self._on_submit(sender, message, now_s)
            case Resume():
                return self._on_resume(sender, message, now_s)
            case Continue():
                return self._on_continue(sender, message, now_s)
            case Cancel():
                return self._on_cancel(sender, message, now_s)
            case Drain() | ChangeRole() | MoveModules() | ListInstances() | Migrate():
                return self._operators.on_order(sender, message, now_s)
            case KeepContext(context_id, keys, ttl_s):
                return self.contexts.keep(context_id, keys, ttl_s, now_s)
            case DropContext(context_id):
                return self.contexts.drop(context_id)
            case Register():
                return self._joining.register(sender, message, now_s)
            case Returning():
                return self._joining.returning(sender, message, now_s)
            case _:
                return self._on_worker(sender, message, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Do everything that is due: drop silent peers, retry waiting requests, continue moves and copies.

        The caller should call it about twice a second.
        """
        effects: list[Effect] = []
        self._forgive_own_silence(now_s)
        deadline_s = now_s - self.limits.peer_timeout_s
        for front in self._fronts.silent_since(deadline_s):
            effects += self._drop_front(front, now_s)
        self.instances.forget_lost(now_s)
        self._requests.suspicion.forget(now_s - self.limits.return_grace_s)
        effects += self._losses.drop(self.instances.silent_since(deadline_s), "stopped answering", now_s)
        effects += self._reports.end_late_migrations(now_s)
        effects += self._resumption.tick(now_s)
        effects += self._placer.retry_waiting(now_s)
        effects += self._reports.ask_again()
        effects += self._emptier.tick(now_s) + self._leaving.go_on(now_s) + self._settle(now_s)
        effects += self.elasticity.tick(now_s) + self._settle(now_s)
        effects += self.contexts.tick(now_s)
        if self.replication is not None:
            effects += self.replication.tick(now_s)
        return effects

    def _forgive_own_silence(self, now_s: float) -> None:
        """Extend the deadlines of peers by the time in which the Conductor itself was held up.

        Messages that peers have sent in this time may still be unread.
        """
        gap_s = now_s - self._last_tick_s if self._last_tick_s is not None else 0.0
        self._last_tick_s = now_s
        if gap_s > self.limits.peer_timeout_s / 2:
            self._fronts.forgive(gap_s, now_s)
            for instance in self.instances:
                instance.last_seen_s = min(instance.last_seen_s + gap_s, now_s)

    def peer_gone(self, peer: bytes, now_s: float) -> list[Effect]:
        """Handle a send that failed because the peer is not connected. Returns the messages to send."""
        if peer in self._fronts:
            effects = self._drop_front(peer, now_s)
        elif (instance := self.instances.by_identity(peer)) is not None:
            effects = self._losses.drop([instance], "is not connected", now_s)
        else:
            return []
        return effects + self._settle(now_s) + self._placer.retry_queued(now_s)

    # -- fronts -------------------------------------------------------------------------------------

    def _on_hello(self, sender: bytes, hello: FrontHello, now_s: float) -> Effect:
        if hello.epoch not in (0, self._requests.epoch):
            self._resumption.begin(hello.num_instances, now_s)
        return self._fronts.hello(sender, hello, now_s)

    def _on_resume(self, sender: bytes, resume: Resume, now_s: float) -> list[Effect]:
        if sender not in self._fronts or resume.request.request_id in self.requests:
            return []  # a front that was given up has been told so; a request may have come twice
        tracked = self._requests.resumed(sender, resume.request, resume.waited_s, now_s)
        return self._resumption.resume(tracked, now_s)

    def _on_submit(self, sender: bytes, submit: Submit, now_s: float) -> list[Effect]:
        if sender not in self._fronts:
            return []  # the front had another Conductor, and will resume the request under this one
        tracked = self._requests.new(sender, submit.request, now_s)
        reason = self._reason_to_reject(tracked, submit, now_s)
        if reason is not None:
            return [self._endings.tell_rejected(sender, tracked.request_id, *reason)]
        is_announced = self._requests.running.take_announced(tracked)
        making_room = [] if is_announced else self._room_for(tracked, submit.num_choices, now_s)
        if making_room is None:
            self.elasticity.submitted(tracked, now_s, submit.num_choices)
            num_running, most = self._requests.running.number, self.limits.max_running_requests
            message = f"{num_running} requests are running, the limit is {most}"
            if submit.num_choices > 1:
                message += f", and the answer has {submit.num_choices} choices"
            return [self._endings.tell_rejected(sender, tracked.request_id, Reason.TOO_MANY, message)]
        self._fronts.seen(sender, now_s)
        if submit.claim is not None:
            tracked.num_charged_tokens = submit.claim.num_tokens
            self.quotas.charge(submit.request.tenant, submit.claim.num_tokens, now_s)
        if self.replication is not None:
            self.replication.note(submit.request.block_keys)
        effects = making_room + self._placer.submit(tracked, now_s)
        self.elasticity.submitted(tracked, now_s)
        if submit.num_choices > 1 and tracked.request_id in self.requests:
            self._requests.running.announce(tracked, submit.num_choices - 1)
            effects.append(Effect(sender, Accepted(tracked.request_id)))
        return effects

    def _room_for(self, tracked: TrackedRequest, num_choices: int, now_s: float) -> list[Effect] | None:
        """Return the messages that make room for a new request; None if the new request must be rejected.

        If `num_choices` more requests would exceed `max_running_requests`, other requests may be rejected in
        favour of the new one. If too few may be rejected, the new request is accepted only if its tenant,
        with all choices of the answer, stays within an equal part of the limit. So if one tenant has filled
        the limit, a second tenant can still run half as many requests, then a third one a third, and so on.
        """
        num_beyond = self._requests.running.num_beyond(num_choices)
        if not num_beyond:
            return []
        rejected = self._placer.reject_for(tracked, num_beyond, now_s)
        if rejected or self._requests.running.are_within_equal_part(tracked.request.tenant, num_choices):
            return rejected
        return None

    def _reason_to_reject(
        self, tracked: TrackedRequest, submit: Submit, now_s: float
    ) -> tuple[Reason, str, float | None] | None:
        """Return why a new request is rejected; None if it is accepted.

        The request may be a further choice of an answer whose first choice runs already. So no rule for
        further choices may depend on the time: such a rule could reject only some choices of an answer.
        Only the first choice has a claim on the tenant's quota.

        Returns:
            The reason, the text for the client, and the seconds after which to retry; None for unknown
            seconds.
        """
        if tracked.request_id in self.requests:
            return Reason.DUPLICATE, f"request id {tracked.request_id!r} is already running", None
        for stage in STAGES:
            if self.instances.lacks(stage):
                return Reason.UNREADY, self.instances.why_none(stage), None
        if (too_large := why_too_large(tracked.request, self.instances)) is not None:
            return Reason.TOO_LARGE, too_large, None
        if submit.num_choices > self.limits.max_running_requests:
            most = f"at most {self.limits.max_running_requests} requests may run"
            return Reason.TOO_LARGE, f"the answer has {submit.num_choices} choices, {most}", None
        tenant = tracked.request.tenant
        if submit.claim is not None:
            num_elsewhere = self._requests.running.num_elsewhere(tenant, tracked.front)
            if (beyond := self.quotas.rejection(tenant, submit.claim, num_elsewhere, now_s)) is not None:
                return beyond
        return None

    def _on_in_flight(self, sender: bytes, request_ids: list[str], now_s: float) -> list[Effect]:
        """End requests that only the Conductor or only the front has, because a message was lost."""
        listed, effects = set(request_ids), list[Effect]()
        own = {key: tracked for key, tracked in self.requests.items() if tracked.front == sender}
        for request_id, tracked in own.items():
            tracked.num_unlisted = 0 if request_id in listed else tracked.num_unlisted + 1
            if tracked.num_unlisted > 1:  # at the first time, the report of its end may be in flight
                effects += self._endings.abort(tracked, now_s)
        unknown = [request_id for request_id in request_ids if request_id not in own]
        return [*effects, Effect(sender, Unknown(unknown))] if unknown else effects

    def _on_cancel(self, sender: bytes, cancel: Cancel, now_s: float) -> list[Effect]:
        tracked = self.requests.get(cancel.request_id)
        if tracked is None or tracked.front != sender:
            return []
        self.quotas.charge(tracked.request.tenant, cancel.num_output_tokens, now_s)
        return self._endings.abort(tracked, now_s)

    def _on_continue(self, sender: bytes, answer: Continue, now_s: float) -> list[Effect]:
        tracked = self.requests.get(answer.request.request_id)
        if tracked is None or tracked.front != sender:
            return []
        if tracked.state is RequestState.INTERRUPTED:
            return self._reports.resubmit(tracked, answer.request, now_s)
        if tracked.state is RequestState.DECODING and answer.attempt == tracked.ref.attempt:
            return self._reports.resubmit_behind_loss(tracked, answer.request, now_s)
        return []  # the front was asked twice, or has asked twice

    def _drop_front(self, front: bytes, now_s: float) -> list[Effect]:
        """Fail the requests of a lost front, and send the failures to the front, which may still be alive."""
        self._fronts.forget(front)
        orphans = [tracked for tracked in self.requests.values() if tracked.front == front]
        reason = "the conductor had lost its connection to this front; try again"
        failed = [self._endings.fail(tracked, reason, now_s, may_retry=True) for tracked in orphans]
        return [effect for effects in failed for effect in effects]

    # -- workers ------------------------------------------------------------------------------------

    def _on_worker(self, sender: bytes, message: FromWorker, now_s: float) -> list[Effect]:
        instance = self.instances.by_identity(sender)
        if isinstance(message, Heartbeat):
            ack = Effect(sender, HeartbeatAck(instance is not None, self._requests.epoch))
            return [ack] if instance is None else [ack, *self._on_heartbeat(instance, message, now_s)]
        if isinstance(message, Leave):
            return self._losses.drop([instance], "has left", now_s) if instance else []
        if instance is None or isinstance(message, Register | Returning):
            return []  # from an earlier life: the answer to its next heartbeat says so
        instance.last_seen_s = now_s
        if isinstance(message, Retire):
            return self._leaving.retire(instance, now_s)
        if self._resumption.keeps(instance, message):
            return []
        if isinstance(message, Finished) and (tracked := self._requests.current(message.ref)) is not None:
            self.elasticity.finished(tracked, message.num_output_tokens, now_s)
        return self._reports.on_work(instance, message, now_s)

    def _on_heartbeat(self, instance: Instance, heartbeat: Heartbeat, now_s: float) -> list[Effect]:
        before, instance.heartbeat, instance.last_seen_s = instance.heartbeat, heartbeat, now_s
        effects = self._modules.heard(instance, before, now_s)
        self.view.learn(instance, heartbeat, now_s)
        load = heartbeat.decode_load
        if load.num_requests and load.tbt_s is not None:
            tbt_slo_s = self._requests.strictest_tbt_slo_s
            self._admission.learn_tbt(instance, load.num_requests, load.tbt_s, tbt_slo_s, now_s)
        return effects
