"""Signs of life of an engine that runs in another process.

An engine that computes brings outputs, or at least its load changes. An engine with requests that shows
neither for `hang_timeout_s` seconds counts as hanging.

Owns: the time of the last sign of life. Does not know: the clock, how the engine is asked.
"""

from workers.errors import EngineLostError


class Pulse:
    """The latest sign of life of one engine."""

    def __init__(self, hang_timeout_s: float | None) -> None:
        """Begin without requests. With None as `hang_timeout_s` the engine may take any time."""
        self._hang_timeout_s = hang_timeout_s
        self._num_requests = 0
        self._last_s = 0.0
        """Time of the latest sign of life in seconds. It has a meaning only while there are requests."""

    def asked(self, now_s: float) -> None:
        """Record that the engine has one more request."""
        if not self._num_requests:
            self._last_s = now_s
        self._num_requests += 1

    def ended(self) -> None:
        """Record that the engine has one request less."""
        self._num_requests -= 1

    def moved(self, now_s: float) -> None:
        """Record a sign of life of the engine."""
        self._last_s = now_s

    def check(self, now_s: float) -> None:
        """Check that the engine does not hang. Raises EngineLostError."""
        if self._hang_timeout_s is None or not self._num_requests:
            return
        if now_s - self._last_s > self._hang_timeout_s:
            raise EngineLostError(
                f"vLLM hangs: {self._num_requests} requests, and no step within {self._hang_timeout_s:g} s"
            )
