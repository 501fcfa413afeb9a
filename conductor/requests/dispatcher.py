"""The steps of accepted requests, from a pair of instances to their end, or back for another pair.

Owns: what follows from what workers say, who is told. Does not know: fronts' and instances' comings and
goings, who gets which pair, and who waits or is rejected (`conductor.requests.placing`).
"""

from conductor.admission.overload import Admission
from conductor.effects import Effect
from conductor.requests.lifecycle import NOT_PLACED, RequestState, TrackedRequest
from conductor.requests.pairs import Pairs
from conductor.requests.placing import Placing
from conductor.requests.suspicion import Suspicion
from conductor.rules import Limits
from conductor.view.assignments import Assignments
from conductor.view.instances import Instance, Instances
from mooncake.messages.fronts import Ended, Interrupted
from mooncake.messages.pools import Grant
from mooncake.messages.requests import Ref, Request
from mooncake.messages.workers import (
    Abort,
    Decode,
    Finished,
    Prefill,
    Prefilled,
    Refused,
    Reserved,
    WorkFailed,
)

FromWork = Reserved | Prefilled | Finished | Refused | WorkFailed


class Dispatcher:
    """The steps of all accepted requests. `instances` are the Conductor's own."""

    def __init__(
        self,
        instances: Instances,
        limits: Limits,
        admission: Admission,
        assignments: Assignments,
        pairs: Pairs,
        placing: Placing,
        suspicion: Suspicion,
        epoch: int,
    ) -> None:
        self._instances, self._limits, self._admission = instances, limits, admission
        self._assignments, self._pairs, self._placing = assignments, pairs, placing
        self._suspicion, self._epoch = suspicion, epoch

    # -- what others ask for ------------------------------------------------------------------------

    def go_on(self, tracked: TrackedRequest, request: Request, now_s: float) -> list[Effect]:
        """The front has said how far the answer of an interrupted one has come."""
        tracked.request = request
        tracked.move_to(RequestState.WAITING)
        return self._placing.place(tracked, now_s)

    def ask_again(self) -> list[Effect]:
        """The fronts that have not said how far an answer has come."""
        return [
            Effect(tracked.front, Interrupted(tracked.request_id))
            for tracked in self._placing.requests.values()
            if tracked.state is RequestState.INTERRUPTED
        ]

    def abort(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Nobody wants it any more."""
        effects = self._pairs.release(tracked, now_s)
        self._placing.end(tracked, RequestState.ABORTED, now_s)
        return effects

    # -- instances that lose their work -------------------------------------------------------------

    def lose(self, lost: list[Instance], reason: str, now_s: float) -> list[Effect]:
        """Instances are gone, with all that they had: it is placed again, as often as that happens."""
        for instance in lost:
            self._suspicion.lost(instance.name, self._computed_by(instance), now_s)
            for tracked in self._placing.requests.values():
                tracked.failures = [lives for lives in tracked.failures if instance.identity not in lives]
        effects = []
        for instance in lost:
            for request_id in list(instance.requests):
                tracked = self._placing.requests[request_id]
                if instance.name in (tracked.prefill, tracked.decode):
                    effects += self._place_again(tracked, f"{instance.name} {reason}", now_s)
        return effects

    def _computed_by(self, instance: Instance) -> list[str]:
        """The requests that may have been in a pass of `instance`."""
        requests = [self._placing.requests[request_id] for request_id in instance.requests]
        return [
            tracked.request_id
            for tracked in requests
            if (tracked.state is RequestState.PREFILLING and tracked.prefill == instance.name)
            or (tracked.state is RequestState.DECODING and tracked.decode == instance.name)
        ]

    def hear_of_end(self, instance: str, failed_in: list[Ref] | None, now_s: float) -> list[Effect]:
        """A process of an instance says in whose pass its life before failed: a request that has ended two
        instances ends."""
        requests = self._placing.requests
        in_pass = (
            None if failed_in is None else {ref.request_id for ref in failed_in if ref.epoch == self._epoch}
        )
        self._suspicion.told(instance, in_pass, requests, now_s)
        effects: list[Effect] = []
        for tracked in list(requests.values()):
            if ended := self._suspicion.ended_by(tracked.request_id):
                self._suspicion.found(tracked.request_id)
                reason = f"the instances that computed it have failed: {', '.join(ended)}"
                effects += self._placing.fail(tracked, reason, now_s)
        return effects

    # -- what workers say ---------------------------------------------------------------------------

    def heard(self, sender: Instance, message: FromWork, now_s: float) -> list[Effect]:
        """A step of a request, done or failed."""
        tracked = self._current(message.ref)
        if tracked is None:
            return [] if isinstance(message, Finished) else [Effect(sender.identity, Abort(message.ref))]
        match message:
            case Reserved() if tracked.state is RequestState.RESERVING:
                return self._on_reserved(tracked, sender, message, now_s)
            case Prefilled() if tracked.state is RequestState.PREFILLING:
                return self._on_prefilled(tracked, message, now_s)
            case Finished() if tracked.state is RequestState.DECODING:
                self._assignments.end_decode(tracked.request_id, now_s, message.num_output_tokens)
                self._placing.end(tracked, RequestState.FINISHED, now_s)
                return [Effect(tracked.front, Ended(tracked.request_id, message.num_output_tokens))]
            case Refused():
                return self._on_refused(tracked, sender, message, now_s)
            case WorkFailed():
                return self._on_work_failed(tracked, message.reason, message.retryable, now_s)
        return []  # a duplicate of a step already taken

    def _current(self, ref: Ref) -> TrackedRequest | None:
        """The request that `ref` is the running attempt of."""
        tracked = self._placing.requests.get(ref.request_id)
        if tracked is None or tracked.ref != ref or tracked.state in NOT_PLACED:
            return None
        return tracked

    def _on_reserved(
        self, tracked: TrackedRequest, decode: Instance, reserved: Reserved, now_s: float
    ) -> list[Effect]:
        if reserved.inlined:
            self._prefill_is_done(tracked, now_s, None)
            return []
        prefill = self._instances.get(tracked.prefill)
        assert prefill is not None
        tracked.move_to(RequestState.PREFILLING)
        num_held_blocks = _num_held_blocks(tracked.request, reserved.grant)
        time_left_s = self._time_left_s(tracked, now_s)
        source = self._assignments.order_prefill(
            tracked.request_id, decode, num_held_blocks, time_left_s, now_s
        )
        num_blocks = self._assignments.get(tracked.request_id).placement.num_local_blocks
        if source is not None:
            num_blocks = max(num_blocks, source.num_blocks)
        alone = self._suspicion.is_suspect(tracked.request_id)
        order = Prefill(tracked.ref, tracked.request, reserved.grant, time_left_s, source, num_blocks, alone)
        return [Effect(prefill.identity, order)]

    def _time_left_s(self, tracked: TrackedRequest, now_s: float) -> float | None:
        """Until the first token is due."""
        ttft_slo_s = self._limits.slos_of(tracked.request).ttft_s
        return None if ttft_slo_s is None else tracked.submitted_s + ttft_slo_s - now_s

    def _on_prefilled(self, tracked: TrackedRequest, prefilled: Prefilled, now_s: float) -> list[Effect]:
        decode = self._instances.get(tracked.decode)
        assert decode is not None
        num_tokens = len(tracked.request.token_ids)
        if prefilled.num_cached_tokens > num_tokens:
            reason = (
                f"{tracked.prefill} says {prefilled.num_cached_tokens} of {num_tokens} tokens were cached"
            )
            return self._on_work_failed(tracked, reason, True, now_s)
        if not tracked.may_have_begun:
            rejection = self._admission.check_decode(decode, num_tokens, self._pairs.slos(tracked))
            if rejection is not None:
                return self._placing.reject_by_slo(tracked, rejection, now_s)
        self._prefill_is_done(tracked, now_s, prefilled.num_cached_tokens)
        order = Decode(
            tracked.ref,
            prefilled.first_token,
            prefilled.num_cached_tokens,
            prefilled.first_logprobs,
            self._time_left_s(tracked, now_s),
        )
        return [Effect(decode.identity, order)]

    def _prefill_is_done(self, tracked: TrackedRequest, now_s: float, num_cached_tokens: int | None) -> None:
        """What is left is its messenger's work. `num_cached_tokens` is None for an inlined prompt."""
        tracked.move_to(RequestState.DECODING)
        tracked.may_have_begun = True
        prefill = self._instances.get(tracked.prefill)
        assert prefill is not None
        prefill.requests.pop(tracked.request_id, None)
        self._assignments.end_prefill(tracked.request_id, now_s, num_cached_tokens)

    def _on_refused(
        self, tracked: TrackedRequest, instance: Instance, refused: Refused, now_s: float
    ) -> list[Effect]:
        """The double check of section 3: place it where it has not been refused, or reject it."""
        if tracked.state is RequestState.DECODING:
            self._admission.refused(instance, refused.batch_size, refused.predicted_tbt_s, now_s)
        return self._placing.place_elsewhere(tracked, instance, refused.reason, now_s)

    def _on_work_failed(
        self, tracked: TrackedRequest, reason: str, retryable: bool, now_s: float
    ) -> list[Effect]:
        """An attempt has failed: the request is placed again, unless it fails for good.

        An attempt counts if no instance of its pair is lost, which would explain the failure.
        """
        if all(self._instances.by_identity(life) is not None for life in tracked.lives):
            tracked.failures.append(tracked.lives)
        if not retryable or len(tracked.failures) >= self._limits.max_attempts:
            return self._placing.fail(tracked, reason, now_s)
        return self._place_again(tracked, reason, now_s)

    def _place_again(self, tracked: TrackedRequest, reason: str, now_s: float) -> list[Effect]:
        """Run it elsewhere: from its beginning, or behind what the front has of the answer."""
        effects = self._pairs.release(tracked, now_s)
        tracked.refused_by.clear()
        tracked.is_promised = True
        tracked.last_failure, tracked.waiting_since_s = reason, now_s
        if tracked.may_have_begun:
            tracked.move_to(RequestState.INTERRUPTED)
            return [*effects, Effect(tracked.front, Interrupted(tracked.request.request_id))]
        tracked.move_to(RequestState.WAITING)
        return effects + self._placing.place(tracked, now_s)


def _num_held_blocks(request: Request, grant: Grant) -> int:
    """Of the prompt's first blocks, those that the decode side does not lack."""
    missing = [page.block_index for page in grant.pages]
    return min([*missing, len(request.block_keys)])
