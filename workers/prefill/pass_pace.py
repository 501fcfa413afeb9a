"""The pace at which an instance computes prompts.

Owns: this mean. Does not know: the clock, its readers.
"""


class PassPace:
    """The mean time in which passes compute a token. Waits for loads do not count."""

    def __init__(self) -> None:
        self._num_tokens, self._seconds = 0, 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record that a pass has computed `num_tokens` in `seconds`."""
        self._num_tokens += num_tokens
        self._seconds += seconds

    @property
    def seconds_per_token(self) -> float:
        """The mean seconds of a token; 0 before the first pass."""
        return self._seconds / self._num_tokens if self._num_tokens else 0.0
