"""Workers' reports about the steps of placed requests, and the attempts that follow failures and losses.

Owns: the reactions to workers' reports, to the loss of instances, and to fronts' reports of how far outputs
have come. Does not know: how a loss is noticed, which request gets which pair (`conductor.requests.placer`).
"""

from conductor.admission.overload import Admission
from conductor.effects import Effect
from conductor.requests.endings import Endings
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.migrations import Migrations
from conductor.requests.placer import Placer
from conductor.requests.registry import Requests
from conductor.view.instances import Instance
from mooncake.messages.fronts import Ended, Interrupted
from mooncake.messages.migration import FromMigration, HandedOver, PreCopied, Prepared
from mooncake.messages.requests import Ref, Request
from mooncake.messages.workers import Abort, DecodeRefused, Finished, Prefilled, Reserved, WorkFailed

FromWork = Reserved | Prefilled | Finished | DecodeRefused | WorkFailed | FromMigration


class WorkerReports:
    """Handles workers' reports about placed requests, and moves requests from state to state."""

    def __init__(
        self,
        requests: Requests,
        placer: Placer,
        endings: Endings,
        admission: Admission,
        migrations: Migrations,
    ) -> None:
        self._requests, self._placer, self._endings = requests, placer, endings
        self._admission, self._migrations = admission, migrations

    # -- resubmission -------------------------------------------------------------------------------

    def resubmit(self, tracked: TrackedRequest, request: Request, now_s: float) -> list[Effect]:
        """Place an interrupted request again, after its front has reported how far its output has come."""
        self._requests.resume(tracked, request)
        return self._placer.place(tracked, now_s)

    def resubmit_behind_loss(self, tracked: TrackedRequest, request: Request, now_s: float) -> list[Effect]:
        """Place a running request again, because its front lacks tokens in the middle of the output.

        The attempt counts as failed if the front has no new token from it.
        """
        reason = f"tokens from {request.num_output_tokens} on were lost on their way"
        has_got_on = request.num_output_tokens > tracked.request.num_output_tokens
        if not has_got_on and self._count_failure(tracked):
            return self._endings.fail(tracked, reason, now_s)
        effects = self._release(tracked, RequestState.INTERRUPTED, reason, now_s)
        return effects + self.resubmit(tracked, request, now_s)

    def ask_again(self) -> list[Effect]:
        """Return messages that ask the fronts of interrupted requests for the output so far."""
        return [
            Effect(tracked.front, Interrupted(tracked.request_id))
            for tracked in self._requests.by_id.values()
            if tracked.state is RequestState.INTERRUPTED
        ]

    # -- lost instances -----------------------------------------------------------------------------

    def lose(self, lost: list[Instance], reason: str, now_s: float) -> list[Effect]:
        """Begin another attempt of each request of the lost instances, however many attempts it has had.

        `reason` is the text that follows an instance's name in errors.
        """
        by_id = self._requests.by_id
        for instance in lost:
            self._requests.suspicion.instance_lost(instance.name, self._computed_by(instance), now_s)
            for tracked in by_id.values():
                tracked.failures = [pair for pair in tracked.failures if instance.identity not in pair]
        effects = self._migrations.lose(lost)
        for instance in lost:
            for request_id in list(instance.requests):
                # Placing one request again may have preempted other requests that were here: they have ended,
                # or have another pair. A request that was about to move here goes on at its source.
                here = by_id.get(request_id)
                if here is not None and instance.name in (here.prefill, here.decode):
                    effects += self._retry(here, f"{instance.name} {reason}", now_s)
        return effects

    def _computed_by(self, instance: Instance) -> list[str]:
        """Return the ids of the requests that may have been in a forward pass of `instance`."""
        requests = [self._requests.by_id[request_id] for request_id in instance.requests]
        return [
            tracked.request_id
            for tracked in requests
            if (tracked.state is RequestState.PREFILLING and tracked.prefill == instance.name)
            or (tracked.state is RequestState.DECODING and tracked.decode == instance.name)
        ]

    def on_returning(self, instance: str, failed_in: list[Ref] | None, now_s: float) -> list[Effect]:
        """Record in which forward pass a process failed, and end the requests that prove to be poison.

        Args:
            instance: The name of the process's instance.
            failed_in: The requests of that pass; None if the process does not know them.
            now_s: The time.
        """
        suspicion, by_id = self._requests.suspicion, self._requests.by_id
        in_pass = None
        if failed_in is not None:
            in_pass = {ref.request_id for ref in failed_in}
        suspicion.reported(instance, in_pass, by_id, now_s)
        effects: list[Effect] = []
        for tracked in list(by_id.values()):
            if ended := suspicion.ended_by(tracked.request_id):
                suspicion.found_poison(tracked.request_id)
                reason = f"the instances that computed it have failed: {', '.join(ended)}"
                effects += self._endings.fail(tracked, reason, now_s)
        return effects

    # -- what workers say ---------------------------------------------------------------------------

    def on_work(self, sender: Instance, message: FromWork, now_s: float) -> list[Effect]:
        """Handle a worker's report that a step of a request is done or has failed.

        If the attempt is neither a request's current one nor the one to which a migration leads, the worker
        is ordered to stop it.
        """
        tracked = self._requests.current(message.ref)
        if tracked is None and (coming := self._requests.coming(message.ref)) is not None:
            return self._on_destination(coming, message, now_s)
        if tracked is None:
            return [] if isinstance(message, Finished) else [Effect(sender.identity, Abort(message.ref))]
        match message:
            case Reserved() if tracked.state is RequestState.RESERVING:
                return self._requests.begin_prefill(tracked, message.grant, now_s)
            case Prefilled() if tracked.state is RequestState.PREFILLING:
                return self._on_prefilled(tracked, message, now_s)
            case Finished() if tracked.state is RequestState.DECODING:
                effects = self._requests.finish(tracked, message.num_output_tokens, now_s)
                return [*effects, Effect(tracked.front, Ended(tracked.request_id, message.num_output_tokens))]
            case PreCopied() if tracked.state is RequestState.DECODING:
                return self._migrations.on_pre_copied(tracked, message, now_s)
            case HandedOver() if tracked.state is RequestState.DECODING:
                return self._on_handed_over(tracked, message, now_s)
            case DecodeRefused():
                return self._on_decode_refused(tracked, sender, message, now_s)
            case WorkFailed(is_refused=True):
                return self._endings.refuse(tracked, message.reason, message.param, now_s)
            case WorkFailed():
                return self._on_work_failed(tracked, message.reason, message.retryable, now_s)
        return []  # such as the repeated report of a step

    def _on_destination(self, tracked: TrackedRequest, message: FromWork, now_s: float) -> list[Effect]:
        """Handle a message from the destination of a migration."""
        match message:
            case Prepared():
                return self._migrations.on_prepared(tracked, message, now_s)
            case WorkFailed():
                return self._migrations.end_refused(tracked, now_s)
        return []

    def _on_handed_over(self, tracked: TrackedRequest, handed_over: HandedOver, now_s: float) -> list[Effect]:
        effects = self._migrations.on_handed_over(tracked, handed_over.output, now_s)
        if effects is not None:
            return effects
        return self._retry(tracked, f"{tracked.decode} has handed it over, and nobody takes it", now_s)

    def end_late_migrations(self, now_s: float) -> list[Effect]:
        """End the migrations that are past their deadline."""
        effects, stopped = self._migrations.end_late(now_s)
        for tracked in stopped:
            effects += self._retry(tracked, f"{tracked.decode} has not handed it over in time", now_s)
        return effects

    def _on_prefilled(self, tracked: TrackedRequest, prefilled: Prefilled, now_s: float) -> list[Effect]:
        num_tokens = len(tracked.request.token_ids)
        if prefilled.num_cached_tokens > num_tokens:
            reason = (
                f"{tracked.prefill} says {prefilled.num_cached_tokens} of {num_tokens} tokens were cached"
            )
            return self._on_work_failed(tracked, reason, True, now_s)
        if tracked.may_be_refused:
            decode, slos = tracked.placed.placement.decode, self._requests.slos_in_batch(tracked)
            rejection = self._admission.check_decode(decode, num_tokens, slos)
            if rejection is not None:
                return self._endings.reject_by_slo(tracked, rejection, now_s)
        return self._requests.begin_decode(tracked, prefilled, now_s)

    def _on_decode_refused(
        self, tracked: TrackedRequest, instance: Instance, refused: DecodeRefused, now_s: float
    ) -> list[Effect]:
        """Handle a refusal in the double check (section 3).

        The request is placed on another decode instance, waits in the admission queue, or is rejected. A
        refusal before DECODING, as only a faulty worker sends it, says nothing about the instance's load.
        """
        if tracked.state is RequestState.DECODING:
            self._admission.learn_refusal(instance, refused.batch_size, refused.predicted_tbt_s, now_s)
        return self._placer.place_after_refusal(tracked, instance, refused.reason, now_s)

    def _on_work_failed(
        self, tracked: TrackedRequest, reason: str, retryable: bool, now_s: float
    ) -> list[Effect]:
        """Retry the request, or end it if the failure is final or no attempt is left."""
        if self._count_failure(tracked) or not retryable:
            return self._endings.fail(tracked, reason, now_s)
        return self._retry(tracked, reason, now_s)

    def _count_failure(self, tracked: TrackedRequest) -> bool:
        """Count a failed attempt, and return whether the request has used up its attempts.

        An attempt does not count if an instance of its pair is lost: the loss explains the failure.
        """
        pair = tracked.placed.placement.identities
        if all(self._requests.instances.by_identity(identity) is not None for identity in pair):
            tracked.failures.append(pair)
        return len(tracked.failures) >= self._requests.limits.max_attempts

    def _retry(self, tracked: TrackedRequest, reason: str, now_s: float) -> list[Effect]:
        """Begin another attempt: from the start, or after the front's output if the front may have any."""
        if tracked.may_have_begun:
            effects = self._release(tracked, RequestState.INTERRUPTED, reason, now_s)
            return [*effects, Effect(tracked.front, Interrupted(tracked.request_id))]
        effects = self._release(tracked, RequestState.WAITING, reason, now_s)
        return effects + self._placer.place(tracked, now_s)

    def _release(
        self, tracked: TrackedRequest, state: RequestState, reason: str, now_s: float
    ) -> list[Effect]:
        effects = self._requests.release(tracked, state, now_s)
        tracked.refused_by.clear()
        tracked.is_promised, tracked.last_failure = True, reason
        return effects
