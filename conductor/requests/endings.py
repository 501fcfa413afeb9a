"""The ends of requests that are aborted, failed, refused or rejected, and the messages about them to fronts.

Owns: these messages. A front gets none about an aborted request. Does not know: why a request ends, or which
one.
"""

from conductor.admission.overload import Admission
from conductor.effects import Effect
from conductor.requests.lifecycle import RequestState, TrackedRequest
from conductor.requests.registry import Requests
from conductor.view.rejection import Reason, Rejection
from mooncake.messages.fronts import Failed, Rejected

_RETRY_AFTER_S = 1.0
"""Seconds after which a rejected client may try again, where nothing better is known."""


class Endings:
    """Ends requests of the registry before they have all their tokens."""

    def __init__(self, requests: Requests, admission: Admission) -> None:
        self._requests, self._admission = requests, admission
        self._stats = requests.stats

    def abort(self, tracked: TrackedRequest, now_s: float) -> list[Effect]:
        """End a request whose client has left, or that its front does not know any more."""
        return self._requests.cut_short(tracked, RequestState.ABORTED, now_s)

    def fail(
        self, tracked: TrackedRequest, reason: str, now_s: float, *, may_retry: bool = False
    ) -> list[Effect]:
        """End a request that cannot be finished.

        `may_retry`: the request did not cause the failure, so its client may send it again.
        """
        effects = self._requests.cut_short(tracked, RequestState.FAILED, now_s)
        return [*effects, Effect(tracked.front, Failed(tracked.request_id, reason, may_retry))]

    def refuse(self, tracked: TrackedRequest, reason: str, param: str | None, now_s: float) -> list[Effect]:
        """End a request that asks for a feature that its instance does not serve.

        `param`: the field of the request that asks for the feature; None without such a field.
        """
        effects = self._requests.cut_short(tracked, RequestState.REFUSED, now_s)
        failed = Failed(tracked.request_id, reason, is_refused=True, param=param)
        return [*effects, Effect(tracked.front, failed)]

    def tell_rejected(
        self, front: bytes, request_id: str, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> Effect:
        """Return the message to a front that a new or accepted request is rejected, and count the rejection.

        `retry_after_s`: the seconds after which the client may try again. None stands for `_RETRY_AFTER_S` if
        the HTTP status is 429 or 503, and for no time with another status.
        """
        self._stats.rejected(reason)
        if reason.status in (429, 503) and retry_after_s is None:
            retry_after_s = _RETRY_AFTER_S
        return Effect(front, Rejected(request_id, reason, reason.status, message, retry_after_s))

    def reject_by_slo(self, tracked: TrackedRequest, rejection: Rejection, now_s: float) -> list[Effect]:
        """Reject a request that would miss an SLO (Algorithm 1, line 26), with HTTP 429."""
        self._admission.learn_rejection(tracked.request, rejection, now_s)
        return self.reject(tracked, rejection.reason, rejection.message, now_s, rejection.retry_after_s)

    def give_up(self, tracked: TrackedRequest, reason: Reason, message: str, now_s: float) -> list[Effect]:
        """Reject a request whose client has got nothing yet; fail a request whose output has begun.

        A request that is too large now, but has had a pair, did fit once: an instance was lost or has fewer
        pages now. So it fails too, and its client may try again.
        """
        has_become_too_large = reason is Reason.TOO_LARGE and tracked.is_promised
        if tracked.may_have_begun or has_become_too_large:
            return self.fail(tracked, message, now_s, may_retry=True)
        return self.reject(tracked, reason, message, now_s)

    def reject(
        self,
        tracked: TrackedRequest,
        reason: Reason,
        message: str,
        now_s: float,
        retry_after_s: float | None = None,
    ) -> list[Effect]:
        """Reject a request. `retry_after_s`: as in `tell_rejected`."""
        effects = self._requests.cut_short(tracked, RequestState.REJECTED, now_s)
        return [
            *effects,
            self.tell_rejected(tracked.front, tracked.request_id, reason, message, retry_after_s),
        ]
