"""The Conductor: takes a message and the time, returns the messages to send (Mooncake, section 3).

Same state and same input give the same output. No IO, no clock, no torch: the live service and a
simulator drive the very same object.

Owns: which fronts and instances are there. Does not know: sockets, tokens' text, what becomes of accepted
requests (`conductor.requests.placing`, `conductor.requests.dispatcher`).
"""

from conductor.admission.overload import Admission, forecast_of
from conductor.effects import Effect, ToConductor
from conductor.replication.contexts import Contexts
from conductor.replication.copies import Replication
from conductor.requests.dispatcher import Dispatcher
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.pairs import Pairs
from conductor.requests.placing import Placing
from conductor.requests.suspicion import Suspicion
from conductor.rules import Limits, Rules
from conductor.view.assignments import Assignments
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance, Instances
from conductor.view.lateness import Lateness
from conductor.view.outcomes import Outcomes
from conductor.view.placement import Placement, Reason, why_too_large
from conductor.view.stage_loads import decode_load, prefill_load
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import (
    Cancel,
    ClusterState,
    Continue,
    Drain,
    DropContext,
    FrontHello,
    InFlight,
    InstanceDrains,
    KeepContext,
    Submit,
    Unknown,
)
from mooncake.messages.requests import Ref
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    FromWorker,
    Heartbeat,
    HeartbeatAck,
    InstanceState,
    Leave,
    Register,
    Registered,
    RegisterRefused,
    Retire,
    Retired,
    Returning,
    ReturnNoted,
    Role,
)


class Conductor:
    """Policy state of the active Conductor. `epoch` is larger than that of any Conductor before it.

    `profiled`: measured costs of prefill and decode to begin with.
    """

    def __init__(
        self,
        epoch: int,
        fingerprint: str,
        limits: Limits,
        rules: Rules | None = None,
        profiled: tuple[Costs, Costs] | None = None,
    ) -> None:
        self.epoch = epoch
        self.fingerprint = fingerprint
        self.limits = limits
        self.instances = Instances()
        self.outcomes = Outcomes()
        rules = rules or Rules()
        self.view = ClusterView(profiled, rules.kvcache_balancing_threshold)
        self.prefixes = self.view.prefixes
        forecast, lateness = forecast_of(rules.overload), Lateness()
        self._admission = admission = Admission(self.view, forecast, lateness, rules.overload)
        self._assignments = Assignments(self.view, forecast, lateness, self.outcomes, rules)
        may_refuse = admission.has_double_check
        self._suspicion = suspicion = Suspicion(limits.max_attempts)
        pairs = Pairs(self.instances, limits, self._assignments, suspicion, may_refuse=may_refuse)
        self._placing = Placing(
            self.instances,
            self.view,
            limits,
            rules,
            admission,
            self._assignments,
            pairs,
            self.outcomes,
            suspicion,
        )
        self._dispatcher = Dispatcher(
            self.instances, limits, admission, self._assignments, pairs, self._placing, suspicion, epoch
        )
        self.contexts = Contexts(self.prefixes, self.instances)
        self.replication = (
            Replication(self.view, rules.replication)
            if rules.replication is not None and rules.fetches_prefixes
            else None
        )
        self._fronts: dict[bytes, float] = {}  # identity -> last seen
        self._last_tick_s: float | None = None
        self._max_sequence_blocks = 0  # of the last pair that was expected

    @property
    def requests(self) -> dict[str, TrackedRequest]:
        """Accepted requests that have not ended, by id."""
        return self._placing.requests

    @property
    def num_running(self) -> int:
        """Accepted requests that have not ended."""
        return len(self.requests)

    @property
    def num_waiting(self) -> int:
        """Of these, those that wait for load to fall."""
        return self._placing.num_waiting

    def placement_of(self, request_id: str) -> Placement | None:
        """Where a request is, and what was predicted; None while it waits."""
        return self._assignments.placement_of(request_id)

    def stage_loads(self, now_s: float) -> dict[str, float]:
        """In relation to their SLOs; of stages that have one, and instances."""
        loads = {
            "prefill": prefill_load(self.view, self.limits, now_s),
            "decode": decode_load(self.view, self.limits),
        }
        return {stage: load for stage, load in loads.items() if load is not None}

    def handle(self, sender: bytes, message: ToConductor, now_s: float) -> list[Effect]:
        """React to one message."""
        return self._react(sender, message, now_s) + self._placing.use_room(now_s)

    def _react(self, sender: bytes, message: ToConductor, now_s: float) -> list[Effect]:
        match message:
            case FrontHello():
                return self._on_front_hello(sender, message, now_s)
            case InFlight(request_ids):
                return self._on_in_flight(sender, request_ids, now_s)
            case Submit():
                return self._on_submit(sender, message, now_s)
            case Continue():
                return self._on_continue(sender, message, now_s)
            case Cancel():
                return self._on_cancel(sender, message, now_s)
            case Drain():
                return self._on_drain(sender, message, now_s)
            case KeepContext(context_id, keys, ttl_s):
                return self.contexts.keep(context_id, keys, ttl_s, now_s)
            case DropContext(context_id):
                return self.contexts.drop(context_id)
            case Register():
                return self._on_register(sender, message, now_s)
            case Returning():
                return self._on_returning(sender, message, now_s)
            case _:
                return self._on_worker(sender, message, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Let time pass: peers that fell silent, requests that waited too long. Call about once a second."""
        effects: list[Effect] = []
        self._forgive_own_silence(now_s)
        deadline_s = now_s - self.limits.peer_timeout_s
        for front in [identity for identity, seen_s in self._fronts.items() if seen_s < deadline_s]:
            effects += self._drop_front(front, now_s)
        self.instances.forget_lost(now_s)
        self._suspicion.forget(now_s - self.limits.return_grace_s)
        effects += self._drop_instances(self.instances.silent_since(deadline_s), "stopped answering", now_s)
        effects += self._placing.place_waiting(now_s)
        effects += self._dispatcher.ask_again()
        effects += self._retire()
        effects += self.contexts.tick(now_s)
        if self.replication is not None:
            effects += self.replication.tick(now_s)
        return effects

    def _forgive_own_silence(self, now_s: float) -> None:
        """Time in which we did not listen is no one else's silence: their messages wait to be read."""
        gap_s = now_s - self._last_tick_s if self._last_tick_s is not None else 0.0
        self._last_tick_s = now_s
        if gap_s > self.limits.peer_timeout_s / 2:
            for instance in self.instances:
                instance.last_seen_s = min(instance.last_seen_s + gap_s, now_s)
            for front, last_seen_s in self._fronts.items():
                self._fronts[front] = min(last_seen_s + gap_s, now_s)

    def peer_gone(self, peer: bytes, now_s: float) -> list[Effect]:
        """A send failed: the peer is not connected."""
        if peer in self._fronts:
            return self._drop_front(peer, now_s) + self._placing.use_room(now_s)
        instance = self.instances.by_identity(peer)
        if instance is None:
            return []
        return self._drop_instances([instance], "is not connected", now_s) + self._placing.use_room(now_s)

    # -- fronts -------------------------------------------------------------------------------------

    def _on_front_hello(self, sender: bytes, hello: FrontHello, now_s: float) -> list[Effect]:
        refusal = self._mismatch("this front", hello.protocol_version, hello.fingerprint)
        if refusal is not None:
            return [Effect(sender, RegisterRefused(refusal))]
        known = sender in self._fronts
        self._fronts[sender] = now_s
        return [Effect(sender, self._cluster_state(known=known))]

    def _on_in_flight(self, sender: bytes, request_ids: list[str], now_s: float) -> list[Effect]:
        """What the connection has swallowed ends: here if nobody waits for it, there if nobody has it."""
        listed, effects = set(request_ids), list[Effect]()
        own = {key: tracked for key, tracked in self.requests.items() if tracked.front == sender}
        for request_id, tracked in own.items():
            tracked.num_unlisted = 0 if request_id in listed else tracked.num_unlisted + 1
            if tracked.num_unlisted > 1:  # the first time its instance may be about to say that it has ended
                effects += self._dispatcher.abort(tracked, now_s)
        unknown = [request_id for request_id in request_ids if request_id not in own]
        return [*effects, Effect(sender, Unknown(unknown))] if unknown else effects

    def _on_submit(self, sender: bytes, submit: Submit, now_s: float) -> list[Effect]:
        request = submit.request
        ref = Ref(self.epoch, request.request_id, 0)
        tracked = TrackedRequest(request, sender, ref, submitted_s=now_s, waiting_since_s=now_s)
        refusal = self._reason_to_reject(sender, submit)
        given_way: list[Effect] = []
        is_owed = False
        if refusal is not None and refusal[0] is Reason.TOO_MANY:
            given_way = self._placing.make_place(tracked, now_s)
            is_owed = self._placing.is_owed_a_place(request.tenant)
        if refusal is not None and not (given_way or is_owed):
            return [self._placing.rejected(sender, request.request_id, *refusal)]
        self._fronts[sender] = now_s
        if self.replication is not None:
            self.replication.note(submit.request.block_keys)
        return given_way + self._placing.submit(tracked, now_s)

    def _reason_to_reject(self, front: bytes, submit: Submit) -> tuple[Reason, str] | None:
        request_id = submit.request.request_id
        if front not in self._fronts:
            return Reason.UNREADY, "this front has not said hello"
        if request_id in self.requests:
            return Reason.DUPLICATE, f"request id {request_id!r} is already running"
        for role in (Role.PREFILL, Role.DECODE):
            if self.instances.largest(role) is None:
                return Reason.UNREADY, self.instances.why_none(role)
        if (too_large := why_too_large(submit.request, self.instances)) is not None:
            return Reason.TOO_LARGE, too_large
        most = self.limits.max_running_requests
        if self.num_running >= most:
            return Reason.TOO_MANY, f"{self.num_running} requests are running, the limit is {most}"
        return None

    def _on_cancel(self, sender: bytes, cancel: Cancel, now_s: float) -> list[Effect]:
        tracked = self.requests.get(cancel.request_id)
        if tracked is None or tracked.front != sender:
            return []
        return self._dispatcher.abort(tracked, now_s)

    def _on_continue(self, sender: bytes, answer: Continue, now_s: float) -> list[Effect]:
        tracked = self.requests.get(answer.request.request_id)
        if tracked is None or tracked.front != sender or tracked.state is not RequestState.INTERRUPTED:
            return []  # it had been asked twice
        return self._dispatcher.go_on(tracked, answer.request, now_s)

    def _drop_front(self, front: bytes, now_s: float) -> list[Effect]:
        self._fronts.pop(front, None)
        orphans = [tracked for tracked in self.requests.values() if tracked.front == front]
        # If it lives after all, it must know that nothing more comes.
        reason = "the conductor had lost its connection to this front"
        return [effect for tracked in orphans for effect in self._placing.fail(tracked, reason, now_s)]

    # -- instances ----------------------------------------------------------------------------------

    def _on_register(self, sender: bytes, register: Register, now_s: float) -> list[Effect]:
        earlier = self.instances.get(register.instance)
        if earlier is not None and earlier.registration.incarnation > register.incarnation:
            refusal = f"a newer {register.instance} is registered; give each instance its own --instance"
            return [Effect(sender, RegisterRefused(refusal, retryable=True))]
        mismatch = self._mismatch(register.instance, register.protocol_version, register.fingerprint)
        if mismatch is not None:
            return [Effect(sender, RegisterRefused(mismatch))]
        if earlier is not None and earlier.identity == sender:
            earlier.last_seen_s = now_s
            return [Effect(sender, Registered())]  # it had not heard the first answer yet
        effects = self._drop_instances([earlier] if earlier is not None else [], "has restarted", now_s)
        instance = Instance(register, sender, last_seen_s=now_s)
        try:
            self.view.add(instance, now_s)
        except ValueError as error:
            refusal = f"{error}; give each instance its own --instance"
            return [*effects, Effect(sender, RegisterRefused(refusal, retryable=True))]
        self.instances.add(instance)
        self._suspicion.back(instance.name)
        effects.append(Effect(sender, Registered()))
        effects += self._placing.place_waiting(now_s)
        return effects + self._tell_fronts()

    def _on_returning(self, sender: bytes, message: Returning, now_s: float) -> list[Effect]:
        """The life before has ended, perhaps unnoticed; the next one serves when it has its model."""
        effects = [Effect(sender, ReturnNoted())]
        instance = self.instances.get(message.instance)
        if instance is not None and instance.registration.incarnation < message.incarnation:
            effects += self._drop_instances([instance], "has died", now_s)
        self.instances.expect(message.instance, now_s + self.limits.placement_timeout_s)
        effects += self._dispatcher.hear_of_end(message.instance, message.failed_in, now_s)
        return effects + self._placing.place_waiting(now_s)

    def _mismatch(self, peer: str, protocol_version: int, fingerprint: str) -> str | None:
        if protocol_version != PROTOCOL_VERSION:
            return (
                f"protocol version differs: the conductor speaks {PROTOCOL_VERSION}, "
                f"{peer} speaks {protocol_version}; run the same release everywhere"
            )
        if fingerprint != self.fingerprint:
            return (
                f"model fingerprint differs: the conductor has {self.fingerprint}, {peer} has "
                f"{fingerprint}; give both the same --model, --dtype and --kvcache-block-size"
            )
        return None

    def _on_worker(self, sender: bytes, message: FromWorker, now_s: float) -> list[Effect]:
        instance = self.instances.by_identity(sender)
        if isinstance(message, Heartbeat):
            if instance is not None:
                instance.last_seen_s, instance.heartbeat = now_s, message
                self.view.heard(instance, message)
                load = message.decode_load
                if load.num_requests and load.tbt_s is not None:
                    tbt_slo_s = self._assignments.strictest_tbt_slo_s
                    self._admission.heard(instance, load.num_requests, load.tbt_s, tbt_slo_s, now_s)
            return [Effect(sender, HeartbeatAck(known=instance is not None))]
        if isinstance(message, Leave):
            return self._drop_instances([instance], "has left", now_s) if instance else []
        if instance is None or isinstance(message, Register | Returning):
            return []  # an earlier life; its next heartbeat is told so
        instance.last_seen_s = now_s
        if isinstance(message, Retire):
            return self._drain(instance, InstanceState.RETIRING, now_s)
        return self._dispatcher.heard(instance, message, now_s)

    def _drop_instances(self, lost: list[Instance], reason: str, now_s: float) -> list[Effect]:
        """All at once, so that no request is placed on one that is dropped next."""
        for instance in lost:
            self.instances.remove(instance.name, now_s + self.limits.return_grace_s)
            self.view.remove(instance)
        effects = self._tell_fronts() if lost else []
        return effects + self._dispatcher.lose(lost, reason, now_s)

    # -- draining -----------------------------------------------------------------------------------

    def _on_drain(self, sender: bytes, order: Drain, now_s: float) -> list[Effect]:
        instance = self.instances.get(order.instance)
        if instance is None:
            return [Effect(sender, InstanceDrains(order.instance, None, 0))]
        if order.is_wanted:
            effects = self._drain(instance, InstanceState.DRAINING, now_s)
        else:
            effects = self._serve_again(instance, now_s)
        return [
            *effects,
            Effect(sender, InstanceDrains(instance.name, instance.state, len(instance.requests))),
        ]

    def _drain(self, instance: Instance, state: InstanceState, now_s: float) -> list[Effect]:
        """Nothing more is placed on it, what is queued there goes elsewhere, what runs ends there."""
        if not self.instances.move(instance, state):
            return []
        self.view.close(instance)
        effects = self._placing.hand_back(instance, now_s)
        return effects + self._tell_fronts() + self._retire()

    def _serve_again(self, instance: Instance, now_s: float) -> list[Effect]:
        if not self.instances.move(instance, InstanceState.SERVING):
            return []  # it is about to end by itself
        self.view.open(instance)
        return self._placing.place_waiting(now_s) + self._tell_fronts()

    def _retire(self) -> list[Effect]:
        """Those that want to end, and have nothing left, may."""
        idle = [
            instance
            for instance in self.instances
            if instance.state is InstanceState.RETIRING and not instance.requests
        ]
        return [
            Effect(instance.identity, Retired())
            for instance in idle
            if self.instances.move(instance, InstanceState.RETIRED)
        ]

    # -- what fronts know ---------------------------------------------------------------------------

    def _cluster_state(self, *, known: bool = True) -> ClusterState:
        self._max_sequence_blocks = self.instances.max_sequence_blocks() or self._max_sequence_blocks
        num_serving = {role: len(self.instances.serving(role)) for role in Role}
        return ClusterState(
            self.epoch,
            num_serving[Role.PREFILL],
            num_serving[Role.DECODE],
            self._max_sequence_blocks,
            self.view.mean_prefill_costs(),
            known,
            {role: len(self.instances.of_role(role)) - num_serving[role] for role in Role},
        )

    def _tell_fronts(self) -> list[Effect]:
        state = self._cluster_state()
        return [Effect(front, state) for front in self._fronts]
