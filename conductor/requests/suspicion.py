"""Suspects are requests that may have made an instance fail; *poison* is a request that surely did.

    an instance is lost                       the requests that had begun there are *suspects*
    its next life says that it was killed     these requests are suspects no more
    its next life names a pass as failed      only the requests of that pass are suspects
    two instances have failed in passes
    with only one request in common           that request is *poison*

Until its decode instance has drawn a token, a suspect is computed in passes of its own. So the next loss, if
there is one, tells which suspect is poison. A suspect of two losses waits for the reports of these losses
before a third instance gets it. If only one instance can take a request, `max_attempts` failed lives of this
instance count like two failed instances.

Owns: losses of instances, and the requests that may have caused them. Does not know: where requests are,
instances, messages.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Loss:
    """The loss of one life of an instance."""

    instance: str
    at_s: float
    suspects: set[str]
    """The requests that may have caused the loss, without requests that have finished since.

    At first they are the requests that had begun on the instance; after a report, those of the failed pass.
    """
    running: set[str] = field(init=False)
    """The suspects that have not ended."""
    is_failure: bool = False
    """Whether a process of the instance has failed in a pass of the suspects."""
    is_reported: bool = False
    """Whether a process of the instance has reported how the process's previous life ended."""
    is_open: bool = True
    """Whether the instance has not registered since the loss."""

    def __post_init__(self) -> None:
        self.running = set(self.suspects)

    @property
    def is_unexplained(self) -> bool:
        """Whether a report that clears or blames the suspects may still arrive."""
        return self.is_open and not self.is_reported

    def narrow(self, suspects: set[str], running: Container[str] = ()) -> None:
        """Replace the suspects. `running` contains all requests that have not ended."""
        self.suspects = suspects
        self.running = {request for request in suspects if request in running}


class Suspicion:
    """The losses that running requests may have caused, and the losses that can still be reported.

    If only one instance can take a request, `max_attempts` failed lives of that instance prove that the
    request is poison.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._losses: list[_Loss] = []

    def instance_lost(self, instance: str, suspects: Iterable[str], now_s: float) -> None:
        """Record the loss of an instance for unknown reasons.

        `suspects`: the ids of the requests that had begun on the instance.
        """
        self._losses.append(_Loss(instance, now_s, set(suspects)))

    def reported(
        self, instance: str, failed_in: set[str] | None, running: Container[str], now_s: float
    ) -> None:
        """Record in which pass the previous life of `instance` failed, as one of its processes reports.

        Args:
            instance: The name of the instance. Several of its processes may report.
            failed_in: The requests of the failed pass. Empty if the process was killed, or failed outside a
                pass. None if it failed in a pass and does not know the requests.
            running: All requests that have not ended.
            now_s: The time.
        """
        loss = next((loss for loss in self._losses if loss.instance == instance and loss.is_open), None)
        if loss is None:
            loss = _Loss(instance, now_s, set())
            self._losses.append(loss)
        if failed_in is None:
            loss.is_failure = True
        else:  # a request that has finished meanwhile was not to blame
            blamed = {request for request in failed_in if request in running or request in loss.suspects}
            loss.narrow(blamed | (loss.suspects if loss.is_failure else set()), running)
            loss.is_failure = bool(loss.suspects)
        loss.is_reported = True

    def instance_returned(self, instance: str) -> None:
        """Record that the instance has registered: no more reports of its earlier lives can arrive."""
        for loss in self._losses:
            if loss.instance == instance:
                loss.is_open = False
                if not loss.is_failure:
                    loss.narrow(set())
        self._clear()

    def forget(self, before_s: float) -> None:
        """Forget losses before `before_s` that were not reported and whose instance has not come back."""
        self._losses = [loss for loss in self._losses if loss.at_s >= before_s or not loss.is_unexplained]

    def request_ended(self, request_id: str, *, has_finished: bool) -> None:
        """Record that a request has ended, whether or not it finished.

        If it did (`has_finished`), it is no suspect any more.
        """
        for loss in self._losses:
            loss.running.discard(request_id)
            if has_finished:
                loss.suspects.discard(request_id)
        self._clear()

    def found_poison(self, request_id: str) -> None:
        """Record that a request is poison. All other suspects of the same losses are cleared."""
        self._losses = [loss for loss in self._losses if request_id not in loss.suspects]

    def _clear(self) -> None:
        self._losses = [loss for loss in self._losses if loss.is_open or loss.running]

    def is_suspect(self, request_id: str) -> bool:
        """Return whether the request is a suspect, and so must be computed alone."""
        return any(request_id in loss.suspects for loss in self._losses)

    def must_wait(self, request_id: str) -> bool:
        """Return whether the request must wait for reports of instances that it may have made fail."""
        losses = [loss for loss in self._losses if request_id in loss.suspects]
        return len(losses) > 1 and any(loss.is_unexplained for loss in losses)

    def ended_by(self, request_id: str) -> list[str]:
        """Return the instances that a poison request has made fail, one entry for each life.

        Empty if the request is not poison.
        """
        failures = [loss for loss in self._losses if loss.is_failure and request_id in loss.suspects]
        instances = [loss.instance for loss in failures]
        if len(set(instances)) < 2 and len(instances) < self._max_attempts:
            return []
        common = set.intersection(*(loss.suspects for loss in failures))
        return instances if common == {request_id} else []
