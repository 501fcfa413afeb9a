"""Which requests may be what ends instances, and which one is.

    an instance is lost          -> what had begun there is a *suspect*, until its next life says more
    "the one before was killed"  -> nobody is
    "it failed in this pass"     -> the requests that were in the pass are
    two instances have failed in passes of which one request alone was part each time -> that one is *poison*

A suspect is computed in passes of its own, so that innocents are told from poison by the next loss, if there
is one. A suspect of two losses waits for word of them before a third instance gets it. Where only one
instance can take a request, `max_attempts` lives of it count as two instances do.

Owns: losses that may be somebody's fault, and whose. Does not know: where requests are, instances, messages.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Loss:
    """The end of one life of an instance.

    `suspects`: those that had begun there, then those in its pass; never such as have finished since.
    `running`: of these, those that have not ended.
    """

    instance: str
    at_s: float
    suspects: set[str]
    running: set[str] = field(init=False)
    is_failure: bool = False
    """some process of the instance has failed in a pass of the suspects"""
    has_word: bool = False
    """some process of the instance has said how its life before ended"""
    is_open: bool = True
    """the instance has not registered again"""

    def __post_init__(self) -> None:
        self.running = set(self.suspects)

    @property
    def is_unexplained(self) -> bool:
        """Whether it may still turn out to be somebody's fault, or nobody's."""
        return self.is_open and not self.has_word

    def narrow(self, suspects: set[str], running: Container[str] = ()) -> None:
        """Suspect these and no others."""
        self.suspects = suspects
        self.running = {request for request in suspects if request in running}


class Suspicion:
    """All losses of which a running request is suspected. `max_attempts`: lives of one instance."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._losses: list[_Loss] = []

    def lost(self, instance: str, suspects: Iterable[str], now_s: float) -> None:
        """An instance is gone, for reasons unknown; `suspects` had begun there."""
        self._losses.append(_Loss(instance, now_s, set(suspects)))

    def told(self, instance: str, failed_in: set[str] | None, running: Container[str], now_s: float) -> None:
        """Hear from the next life of a process of `instance` in whose pass the one before failed.

        Args:
            instance: its name; several of its processes may say so.
            failed_in: ids of requests; none if the process was killed, or failed beside its passes. None: it
                failed in a pass, and does not know whose.
            running: ids of all requests that have not ended.
            now_s: the time.
        """
        loss = next((loss for loss in self._losses if loss.instance == instance and loss.is_open), None)
        if loss is None:
            loss = _Loss(instance, now_s, set())
            self._losses.append(loss)
        if failed_in is None:
            loss.is_failure = True
        else:  # those that have finished meanwhile were not to blame
            blamed = {request for request in failed_in if request in running or request in loss.suspects}
            loss.narrow(blamed | (loss.suspects if loss.is_failure else set()), running)
            loss.is_failure = bool(loss.suspects)
        loss.has_word = True

    def back(self, instance: str) -> None:
        """The instance has registered: nobody says more about its earlier lives."""
        for loss in self._losses:
            if loss.instance == instance:
                loss.is_open = False
                if not loss.is_failure:
                    loss.narrow(set())
        self._clear()

    def forget(self, before_s: float) -> None:
        """Blame nobody for losses before this time of which no word has come."""
        self._losses = [loss for loss in self._losses if loss.at_s >= before_s or not loss.is_unexplained]

    def ended(self, request_id: str, *, has_finished: bool) -> None:
        """A request runs no more. One that `has_finished` was not to blame, others may have been."""
        for loss in self._losses:
            loss.running.discard(request_id)
            if has_finished:
                loss.suspects.discard(request_id)
        self._clear()

    def found(self, request_id: str) -> None:
        """Clear all others of the losses of which this request was a suspect: it is poison."""
        self._losses = [loss for loss in self._losses if request_id not in loss.suspects]

    def _clear(self) -> None:
        self._losses = [loss for loss in self._losses if loss.is_open or loss.running]

    def is_suspect(self, request_id: str) -> bool:
        """Whether it is to be computed alone."""
        return any(request_id in loss.suspects for loss in self._losses)

    def must_wait(self, request_id: str) -> bool:
        """Whether no other instance is to get it before there is word of those that it may have ended."""
        losses = [loss for loss in self._losses if request_id in loss.suspects]
        return len(losses) > 1 and any(loss.is_unexplained for loss in losses)

    def ended_by(self, request_id: str) -> list[str]:
        """The instances, one for each life, that a request has ended; none as long as it is not poison."""
        failures = [loss for loss in self._losses if loss.is_failure and request_id in loss.suspects]
        instances = [loss.instance for loss in failures]
        if len(set(instances)) < 2 and len(instances) < self._max_attempts:
            return []
        common = set.intersection(*(loss.suspects for loss in failures))
        return instances if common == {request_id} else []
