"""vLLM's steps, counted by the tokens that come: the Conductor learns from them what a step takes.

Owns: counters. Does not know: their readers.
"""

from mooncake.messages.requests import Ref
from mooncake.messages.workers import DecodeStats


class StepMeter:
    """Totals of the steps of one session.

    A step brings each request one output. So one that had its output of this step begins the next.
    """

    def __init__(self) -> None:
        self._num_steps = self._num_tokens = 0
        self._seconds = 0.0
        self._in_step: dict[Ref, int] = {}
        """Tokens of each request in the present step."""
        self._began_s: float | None = None
        """Time of the first output of the step, None while nothing is generated."""

    def drew(self, ref: Ref, num_tokens: int, now_s: float) -> None:
        """Take note of an output."""
        if ref in self._in_step:
            if self._began_s is not None:
                self._num_steps += 1
                self._num_tokens += sum(self._in_step.values())
                self._seconds += now_s - self._began_s
            self._in_step, self._began_s = {}, now_s
        self._in_step[ref] = num_tokens
        if self._began_s is None:
            self._began_s = now_s

    def left(self, ref: Ref) -> None:
        """Take note that a request has ended: an idle engine takes no step."""
        self._in_step.pop(ref, None)
        if not self._in_step:
            self._began_s = None

    @property
    def stats(self) -> DecodeStats:
        """The totals as heartbeats carry them."""
        return DecodeStats(self._num_steps, self._num_tokens, self._seconds)
