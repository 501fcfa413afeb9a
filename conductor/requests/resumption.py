"""Requests of an earlier Conductor, reported by their fronts and by the instances that still have them.

    front and all instances of a pair report it  the request goes on there (RESUMING ──> PREFILLING, DECODING)
    a front reports it, but not a whole pair     it is placed again, and continues the front's output
    only instances report it                     it is ended there

Instances report requests in their registration. If no pair has been reported for a request, it is placed
again. That happens as soon as the earlier Conductor's number of instances is registered, or after
`Limits.peer_timeout_s`: by then each living peer has reported. After that time, requests that no front has
reported are ended.

Owns: reports that do not match yet. Does not know: messages of fronts, how a request is placed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from conductor.effects import Effect
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.placer import Placer
from conductor.requests.registry import Requests
from conductor.requests.worker_reports import FromWork, WorkerReports
from conductor.view.instances import Instance
from mooncake.messages.fronts import Interrupted
from mooncake.messages.requests import Held, HeldStep, Ref
from mooncake.messages.workers import Abort


@dataclass(slots=True)
class _Attempt:
    """An attempt for which a report is missing: that of its front, or of one of its instances."""

    holders: dict[HeldStep, Instance] = field(default_factory=dict)
    reports: list[tuple[Instance, FromWork]] = field(default_factory=list)
    """Messages about this attempt that instances sent after they had reported it, in order of arrival."""

    @property
    def pair(self) -> tuple[Instance, Instance, RequestState] | None:
        """The prefill instance, decode instance and state of the request; None if a report is missing."""
        holders = self.holders
        if (decode := holders.get(HeldStep.DECODING)) is not None:
            return decode, decode, RequestState.DECODING
        if (decode := holders.get(HeldStep.INLINED)) is not None:
            return decode, decode, RequestState.PREFILLING
        prefill, decode = holders.get(HeldStep.PROMPT), holders.get(HeldStep.RESERVED)
        return None if prefill is None or decode is None else (prefill, decode, RequestState.PREFILLING)


class Resumption:
    """Reports of fronts and instances about requests of an earlier Conductor, matched by attempt."""

    def __init__(self, requests: Requests, placer: Placer, reports: WorkerReports) -> None:
        self._requests, self._placer, self._reports = requests, placer, reports
        self._instances, self._limits = requests.instances, requests.limits
        self._attempts: dict[str, dict[Ref, _Attempt]] = {}
        """The attempts for which a report is missing, by the id of their request."""
        self._num_before = 0
        """The number of instances that the earlier Conductor had; 0 while it is unknown."""
        self._expected_until_s = 0.0
        self._until_s: float | None = None
        """The time until which reports are awaited; None until a peer has mentioned an earlier Conductor."""
        self._is_over = False

    def begin(self, num_instances: int, now_s: float) -> None:
        """Record that a peer knows an earlier Conductor, which had `num_instances` instances.

        `num_instances` is 0 if the peer does not know the number.
        """
        if self._until_s is None:
            self._until_s = now_s + self._limits.peer_timeout_s
            self._expected_until_s = now_s + self._limits.return_grace_s
        self._num_before = max(self._num_before, num_instances)
        if now_s < self._expected_until_s:
            self._instances.expect_all(self._num_before, self._expected_until_s)

    # -- what peers tell ----------------------------------------------------------------------------

    def resume(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Accept a request of an earlier Conductor that its front has reported."""
        self._requests.accept(tracked)
        return self._match(tracked, now_s) + self._place_the_rest(now_s)

    def registered(self, instance: Instance, held: Iterable[Held], now_s: float) -> list[Effect]:
        """Record the requests of an earlier Conductor that an instance still has."""
        effects: list[Effect] = []
        for ref, step in ((one.ref, one.step) for one in held):
            if self._is_over:  # a request that was reported too late was placed again, or had ended
                effects.append(Effect(instance.identity, Abort(ref)))
                continue
            if self._requests.current(ref) is not None:
                continue  # it goes on already: its prefill instance may still be sending blocks
            attempts = self._attempts.setdefault(ref.request_id, {})
            attempts.setdefault(ref, _Attempt()).holders[step] = instance
            tracked = self._requests.by_id.get(ref.request_id)
            if tracked is not None:
                effects += self._match(tracked, now_s)
        return effects + self._place_the_rest(now_s)

    def keeps(self, instance: Instance, message: FromWork) -> bool:
        """Keep a message of an instance if a report about its attempt is still missing.

        Returns whether the message was kept. A kept message is handled when the report has come, and dropped
        if the attempt is given up.
        """
        attempt = self._attempts.get(message.ref.request_id, {}).get(message.ref)
        if attempt is None:
            return False
        attempt.reports.append((instance, message))
        return True

    def lose(self, lost: list[Instance]) -> None:
        """Record that lost instances have no attempts any more."""
        gone = {instance.identity for instance in lost}
        for attempt in [of for attempts in self._attempts.values() for of in attempts.values()]:
            attempt.holders = {
                step: instance for step, instance in attempt.holders.items() if instance.identity not in gone
            }

    # -- what follows -------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """End the wait for reports at its deadline, and stop the requests that no front has reported."""
        if self._until_s is None or self._is_over or now_s < self._until_s:
            return []
        self._is_over = True
        effects = [effect for request_id in list(self._attempts) for effect in self._abandon(request_id)]
        return effects + self._place_the_rest(now_s)

    def _match(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """Continue a request at the pair of its latest attempt for which no instance's report is missing.

        Does nothing if there is no such attempt. If the request is not RESUMING, its reported attempts are
        stopped instead.
        """
        if tracked.state is not RequestState.RESUMING:
            return self._abandon(tracked.request_id)
        attempts = self._attempts.get(tracked.request_id, {})
        whole = [ref for ref, attempt in attempts.items() if attempt.pair is not None]
        if not whole:
            return []
        ref = max(whole, key=lambda ref: (ref.epoch, ref.attempt))
        attempt = attempts.pop(ref)
        pair = attempt.pair
        assert pair is not None
        effects = self._abandon(tracked.request_id)
        self._requests.adopt(tracked, ref, *pair, now_s)
        for instance, report in attempt.reports:
            effects += self._reports.on_work(instance, report, now_s)
        return effects

    def _abandon(self, request_id: str) -> list[Effect]:
        """Forget the reported attempts of a request, and return the orders that stop them."""
        return [
            Effect(instance.identity, Abort(ref))
            for ref, attempt in self._attempts.pop(request_id, {}).items()
            for instance in attempt.holders.values()
        ]

    def _place_the_rest(self, now_s: float) -> list[Effect]:
        """Give up RESUMING requests' earlier attempts, once the wait is over or all instances are back.

        A request whose output may have begun becomes INTERRUPTED, and its front is asked how far the output
        has come. The other requests are placed again.
        """
        are_all_back = self._num_before and len(self._instances) >= self._num_before
        if not (self._is_over or are_all_back):
            return []
        effects: list[Effect] = []
        for tracked in [of for of in self._requests.by_id.values() if of.state is RequestState.RESUMING]:
            effects += self._abandon(tracked.request_id)
            if tracked.may_have_begun:  # more of its output may have come since the front's report
                effects += self._requests.release(tracked, RequestState.INTERRUPTED, now_s)
                effects.append(Effect(tracked.front, Interrupted(tracked.request_id)))
            else:
                effects += self._requests.release(tracked, RequestState.WAITING, now_s)
                effects += self._placer.place(tracked, now_s)
        return effects
