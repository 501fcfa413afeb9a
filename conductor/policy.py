"""The Conductor: takes a message and the time, returns the messages to send (Mooncake, section 3).

Same state and same input give the same output. No IO, no clock, no torch: the live service and a
simulator drive the very same object.

Owns: instances, the life of every accepted request. Does not know: sockets, tokens' text, how a pair is
chosen (`conductor.scheduling`), which requests are too many (`conductor.overload`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from conductor.assignments import Assignments
from conductor.cluster_view import ClusterView
from conductor.instances import Instance, Instances
from conductor.lifecycle import NOT_PLACED, RequestState, TrackedRequest
from conductor.outcomes import Outcomes
from conductor.overload import Admission, forecast_of
from conductor.placement import Placement, Reason, Rejection, why_too_large
from conductor.rules import Rules
from conductor.scheduling import Scheduler
from mooncake.costs import Costs
from mooncake.messages import (
    PROTOCOL_VERSION,
    Abort,
    Cancel,
    ClusterState,
    Continue,
    Decode,
    Ended,
    Failed,
    Finished,
    FromWorker,
    FrontHello,
    Grant,
    Heartbeat,
    HeartbeatAck,
    Interrupted,
    Leave,
    Prefill,
    Prefilled,
    Ref,
    Refused,
    Register,
    Registered,
    RegisterRefused,
    Rejected,
    Request,
    Reserve,
    Reserved,
    Role,
    Submit,
    ToConductor,
    ToFront,
    ToWorker,
    WorkFailed,
)


@dataclass(frozen=True, slots=True)
class Effect:
    """Send `message` to the peer with this socket identity."""

    peer: bytes
    message: ToWorker | ToFront


@dataclass(frozen=True, slots=True)
class Limits:
    """What the Conductor may keep and how long it waits. Times in seconds."""

    max_running_requests: int = 256
    max_attempts: int = 3
    peer_timeout_s: float = 5.0
    placement_timeout_s: float = 60.0
    return_grace_s: float = 10.0
    retry_after_s: float = 1.0
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None


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
        rules = rules or Rules()
        self.epoch = epoch
        self.fingerprint = fingerprint
        self.limits = limits
        self.instances = Instances()
        self.outcomes = Outcomes()
        self.view = ClusterView(profiled)
        self.prefixes = self.view.prefixes
        forecast = forecast_of(rules.overload)
        self._scheduler = Scheduler(self.view, rules)
        self._admission = Admission(self.view, forecast, rules.overload, limits.ttft_slo_s, limits.tbt_slo_s)
        self._assignments = Assignments(self.view, forecast, self.outcomes, rules)
        self.requests: dict[str, TrackedRequest] = {}
        self._fronts: dict[bytes, float] = {}  # identity -> last seen
        self._last_tick_s: float | None = None
        self._max_sequence_blocks = 0  # of the last pair that was expected

    @property
    def num_running(self) -> int:
        """Accepted requests that have not ended."""
        return len(self.requests)

    def placement_of(self, request_id: str) -> Placement | None:
        """Where a request is, and what was predicted; None while it waits."""
        return self._assignments.placement_of(request_id)

    def handle(self, sender: bytes, message: ToConductor, now_s: float) -> list[Effect]:
        """React to one message."""
        match message:
            case FrontHello():
                return self._on_front_hello(sender, message, now_s)
            case Submit():
                return self._on_submit(sender, message, now_s)
            case Continue():
                return self._on_continue(sender, message, now_s)
            case Cancel():
                return self._on_cancel(sender, message)
            case Register():
                return self._on_register(sender, message, now_s)
            case _:
                return self._on_worker(sender, message, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Let time pass: peers that fell silent, requests that waited too long. Call about once a second."""
        effects: list[Effect] = []
        self._forgive_own_silence(now_s)
        deadline_s = now_s - self.limits.peer_timeout_s
        for front in [identity for identity, seen_s in self._fronts.items() if seen_s < deadline_s]:
            effects += self._drop_front(front)
        self.instances.forget_lost(now_s - self.limits.return_grace_s)
        effects += self._drop_instances(self.instances.silent_since(deadline_s), "stopped answering", now_s)
        for tracked in list(self.requests.values()):
            if tracked.state is RequestState.WAITING:
                effects += self._place_or_wait(tracked, now_s)
            elif tracked.state is RequestState.INTERRUPTED:
                effects.append(Effect(tracked.front, Interrupted(tracked.request.request_id)))
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
            return self._drop_front(peer)
        instance = self.instances.by_identity(peer)
        if instance is None:
            return []
        return self._drop_instances([instance], "is not connected", now_s)

    # -- fronts -------------------------------------------------------------------------------------

    def _on_front_hello(self, sender: bytes, hello: FrontHello, now_s: float) -> list[Effect]:
        refusal = self._mismatch("this front", hello.protocol_version, hello.fingerprint)
        if refusal is not None:
            return [Effect(sender, RegisterRefused(refusal))]
        self._fronts[sender] = now_s
        return [Effect(sender, self._cluster_state())]

    def _on_submit(self, sender: bytes, submit: Submit, now_s: float) -> list[Effect]:
        request = submit.request
        refusal = self._reason_to_reject(sender, submit)
        if refusal is not None:
            return [self._rejected(sender, request.request_id, *refusal)]
        self._fronts[sender] = now_s
        tracked = TrackedRequest(request, sender, self.epoch, submitted_s=now_s, waiting_since_s=now_s)
        self.requests[request.request_id] = tracked
        return self._place_or_wait(tracked, now_s)

    def _reason_to_reject(self, front: bytes, submit: Submit) -> tuple[Reason, str] | None:
        request_id = submit.request.request_id
        if front not in self._fronts:
            return Reason.UNREADY, "this front has not said hello"
        if request_id in self.requests:
            return Reason.DUPLICATE, f"request id {request_id!r} is already running"
        for role in Role:
            if self.instances.largest(role) is None:
                return Reason.UNREADY, f"no {role.value} instance is ready"
        if (too_large := why_too_large(submit.request, self.instances)) is not None:
            return Reason.TOO_LARGE, too_large
        most = self.limits.max_running_requests
        if self.num_running >= most:
            return Reason.TOO_MANY, f"{self.num_running} requests are running, the limit is {most}"
        return None

    def _rejected(
        self, front: bytes, request_id: str, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> Effect:
        self.outcomes.rejected(reason)
        if reason.status in (429, 503) and retry_after_s is None:
            retry_after_s = self.limits.retry_after_s
        return Effect(front, Rejected(request_id, reason.status, message, retry_after_s))

    def _on_cancel(self, sender: bytes, cancel: Cancel) -> list[Effect]:
        tracked = self.requests.get(cancel.request_id)
        if tracked is None or tracked.front != sender:
            return []
        return self._abort(tracked)

    def _on_continue(self, sender: bytes, answer: Continue, now_s: float) -> list[Effect]:
        tracked = self.requests.get(answer.request.request_id)
        if tracked is None or tracked.front != sender or tracked.state is not RequestState.INTERRUPTED:
            return []  # it had been asked twice
        tracked.request = answer.request
        tracked.move_to(RequestState.WAITING)
        return self._place_or_wait(tracked, now_s)

    def _abort(self, tracked: TrackedRequest) -> list[Effect]:
        effects = self._release_pair(tracked)
        self._end(tracked, RequestState.ABORTED)
        return effects

    def _drop_front(self, front: bytes) -> list[Effect]:
        self._fronts.pop(front, None)
        orphans = [tracked for tracked in self.requests.values() if tracked.front == front]
        # If it lives after all, it must know that nothing more comes.
        reason = "the conductor had lost its connection to this front"
        return [effect for tracked in orphans for effect in self._fail(tracked, reason)]

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
        effects.append(Effect(sender, Registered()))
        for tracked in list(self.requests.values()):
            if tracked.state is RequestState.WAITING:
                effects += self._place_or_wait(tracked, now_s)
        return effects + self._tell_fronts()

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
            return [Effect(sender, HeartbeatAck(known=instance is not None))]
        if isinstance(message, Leave):
            return self._drop_instances([instance], "has left", now_s) if instance else []
        if instance is None or isinstance(message, Register):
            return []  # an earlier life; its next heartbeat is told so
        instance.last_seen_s = now_s
        tracked = self._current(message.ref)
        if tracked is None:
            return [] if isinstance(message, Finished) else [Effect(sender, Abort(message.ref))]
        match message:
            case Reserved() if tracked.state is RequestState.RESERVING:
                return self._on_reserved(tracked, instance, message, now_s)
            case Prefilled() if tracked.state is RequestState.PREFILLING:
                return self._on_prefilled(tracked, message, now_s)
            case Finished() if tracked.state is RequestState.DECODING:
                self._assignments.end_decode(tracked.request_id, now_s, message.num_output_tokens)
                self._end(tracked, RequestState.FINISHED)
                return [Effect(tracked.front, Ended(tracked.request_id, message.num_output_tokens))]
            case Refused():
                return self._on_refused(tracked, instance, message, now_s)
            case WorkFailed():
                return self._on_work_failed(tracked, message.reason, message.retryable, now_s)
        return []  # a duplicate of a step already taken

    def _on_reserved(
        self, tracked: TrackedRequest, decode: Instance, reserved: Reserved, now_s: float
    ) -> list[Effect]:
        if reserved.inlined:
            self._prefill_is_done(tracked, now_s, None)
            return []
        prefill = self.instances.get(tracked.prefill)
        assert prefill is not None
        tracked.move_to(RequestState.PREFILLING)
        num_held_blocks = _num_held_blocks(tracked.request, reserved.grant)
        source = self._assignments.order_prefill(tracked.request_id, decode, num_held_blocks, now_s)
        time_left_s = self._time_left_s(tracked, now_s)
        order = Prefill(tracked.ref, tracked.request, reserved.grant, time_left_s, source)
        return [Effect(prefill.identity, order)]

    def _on_prefilled(self, tracked: TrackedRequest, prefilled: Prefilled, now_s: float) -> list[Effect]:
        decode = self.instances.get(tracked.decode)
        assert decode is not None
        if not tracked.may_have_begun:
            rejection = self._admission.check_decode(decode, len(tracked.request.token_ids))
            if rejection is not None:
                return self._reject_by_slo(tracked, rejection)
        self._prefill_is_done(tracked, now_s, prefilled.num_cached_tokens)
        order = Decode(
            tracked.ref, prefilled.first_token, prefilled.num_cached_tokens, prefilled.first_logprobs
        )
        return [Effect(decode.identity, order)]

    def _prefill_is_done(self, tracked: TrackedRequest, now_s: float, num_cached_tokens: int | None) -> None:
        """What is left is its messenger's work. `num_cached_tokens` is None for an inlined prompt."""
        tracked.move_to(RequestState.DECODING)
        tracked.may_have_begun = True
        prefill = self.instances.get(tracked.prefill)
        assert prefill is not None
        prefill.requests.pop(tracked.request_id, None)
        self._assignments.end_prefill(tracked.request_id, now_s, num_cached_tokens)

    def _drop_instances(self, lost: list[Instance], reason: str, now_s: float) -> list[Effect]:
        """All at once, so that no request is placed on one that is dropped next."""
        for instance in lost:
            self.instances.remove(instance.name, now_s)
            self.view.remove(instance)
        effects = self._tell_fronts() if lost else []
        for instance in lost:
            for request_id in list(instance.requests):
                tracked = self.requests.get(request_id)
                if tracked is not None and instance.name in (tracked.prefill, tracked.decode):
                    effects += self._on_work_failed(tracked, f"{instance.name} {reason}", True, now_s)
        return effects

    # -- requests -----------------------------------------------------------------------------------

    def _current(self, ref: Ref) -> TrackedRequest | None:
        """The request that `ref` is the running attempt of."""
        tracked = self.requests.get(ref.request_id)
        if tracked is None or tracked.ref != ref or tracked.state in NOT_PLACED:
            return None
        return tracked

    def _time_left_s(self, tracked: TrackedRequest, now_s: float) -> float | None:
        """Until the first token is due."""
        ttft_slo_s = self.limits.ttft_slo_s
        return None if ttft_slo_s is None else tracked.submitted_s + ttft_slo_s - now_s

    def _place_or_wait(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        placement = self._scheduler.schedule(tracked.request, now_s, tracked.refused_by)
        if placement is not None:
            if not tracked.attempt:
                waited_s = now_s - tracked.submitted_s
                num_tokens = len(tracked.request.token_ids)
                rejection = self._admission.check_arrival(placement, num_tokens, waited_s, now_s)
                if rejection is not None:
                    return self._reject_by_slo(tracked, rejection)
            return self._assign(tracked, placement, now_s)
        if tracked.refused_by and self._scheduler.schedule(tracked.request, now_s) is not None:
            return self._reject(tracked, Reason.DOUBLE_CHECK, tracked.last_failure)
        if (too_large := why_too_large(tracked.request, self.instances)) is not None:
            return self._give_up(tracked, Reason.TOO_LARGE, too_large)
        if now_s - tracked.waiting_since_s > self.limits.placement_timeout_s:
            why = f" ({tracked.last_failure})" if tracked.last_failure else ""
            message = f"no pair of instances came back in time{why}"
            return self._give_up(tracked, Reason.NEVER_PLACED, message)
        return []

    def _give_up(self, tracked: TrackedRequest, reason: Reason, message: str) -> list[Effect]:
        """Reject what was never placed; what was has failed."""
        if tracked.attempt:
            return self._fail(tracked, message)
        return self._reject(tracked, reason, message)

    def _reject(
        self, tracked: TrackedRequest, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> list[Effect]:
        effects = self._release_pair(tracked)
        self._end(tracked, RequestState.FAILED)
        return [*effects, self._rejected(tracked.front, tracked.request_id, reason, message, retry_after_s)]

    def _reject_by_slo(self, tracked: TrackedRequest, rejection: Rejection) -> list[Effect]:
        """Algorithm 1, line 26: HTTP 429."""
        return self._reject(tracked, rejection.reason, rejection.message, rejection.retry_after_s)

    def _assign(self, tracked: TrackedRequest, placement: Placement, now_s: float) -> list[Effect]:
        tracked.attempt += 1
        tracked.prefill, tracked.decode = placement.prefill.name, placement.decode.name
        num_tokens = len(tracked.request.token_ids)
        for instance in (placement.prefill, placement.decode):
            instance.requests[tracked.request_id] = num_tokens
        self._assignments.assign(tracked.request, placement, now_s)
        tracked.move_to(RequestState.RESERVING)
        tbt_slo_s = None if tracked.may_have_begun else self._admission.tbt_slo_s
        return [Effect(placement.decode.identity, Reserve(tracked.ref, tracked.request, tbt_slo_s))]

    def _on_refused(
        self, tracked: TrackedRequest, instance: Instance, refused: Refused, now_s: float
    ) -> list[Effect]:
        """The double check of section 3: place it where it has not been refused, or reject it."""
        effects = self._release_pair(tracked)
        tracked.refused_by.add(instance.name)
        tracked.may_have_begun = False  # its first token would have left after the check
        tracked.last_failure, tracked.waiting_since_s = refused.reason, now_s
        tracked.move_to(RequestState.WAITING)
        return effects + self._place_or_wait(tracked, now_s)

    def _on_work_failed(
        self, tracked: TrackedRequest, reason: str, retryable: bool, now_s: float
    ) -> list[Effect]:
        """Run it again elsewhere: from its beginning, or behind what the front has of the answer."""
        tracked.num_failures += 1
        if not retryable or tracked.num_failures >= self.limits.max_attempts:
            return self._fail(tracked, reason)
        effects = self._release_pair(tracked)
        tracked.refused_by.clear()
        tracked.last_failure, tracked.waiting_since_s = reason, now_s
        if tracked.may_have_begun:
            tracked.move_to(RequestState.INTERRUPTED)
            return [*effects, Effect(tracked.front, Interrupted(tracked.request.request_id))]
        tracked.move_to(RequestState.WAITING)
        return effects + self._place_or_wait(tracked, now_s)

    def _fail(self, tracked: TrackedRequest, reason: str) -> list[Effect]:
        effects = self._release_pair(tracked)
        self._end(tracked, RequestState.FAILED)
        return [*effects, Effect(tracked.front, Failed(tracked.request_id, reason))]

    def _release_pair(self, tracked: TrackedRequest) -> list[Effect]:
        """Take the request off its instances and tell those that are alive to stop."""
        effects = []
        self._assignments.release(tracked.request_id)
        for instance in self._pair(tracked):
            instance.requests.pop(tracked.request_id, None)
            effects.append(Effect(instance.identity, Abort(tracked.ref)))
        tracked.prefill = tracked.decode = None
        return effects

    def _end(self, tracked: TrackedRequest, state: RequestState) -> None:
        self._assignments.release(tracked.request_id)
        for instance in self._pair(tracked):
            instance.requests.pop(tracked.request_id, None)
        tracked.move_to(state)
        del self.requests[tracked.request_id]

    def _pair(self, tracked: TrackedRequest) -> Iterable[Instance]:
        candidates = {tracked.prefill, tracked.decode}
        return [
            instance for name in sorted(filter(None, candidates)) if (instance := self.instances.get(name))
        ]

    def _cluster_state(self) -> ClusterState:
        self._max_sequence_blocks = self.instances.max_sequence_blocks() or self._max_sequence_blocks
        return ClusterState(
            self.epoch,
            len(self.instances.of_role(Role.PREFILL)),
            len(self.instances.of_role(Role.DECODE)),
            self._max_sequence_blocks,
        )

    def _tell_fronts(self) -> list[Effect]:
        state = self._cluster_state()
        return [Effect(front, state) for front in self._fronts]


def _num_held_blocks(request: Request, grant: Grant) -> int:
    """Of the prompt's first blocks, those that the decode side does not lack."""
    missing = [page.block_index for page in grant.pages]
    return min([*missing, len(request.block_keys)])
