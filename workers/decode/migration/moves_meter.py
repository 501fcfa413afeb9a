"""Counters of the moves of modules, for heartbeats.

Owns: the counters. Does not know: their readers, how anything moves.
"""

from bisect import bisect_left
from collections import Counter

from mooncake.messages.migration import PAUSE_BOUNDS_S, MovesStats


class MovesMeter:
    """The totals of one session."""

    def __init__(self) -> None:
        self._num_moves: Counter[str] = Counter()
        self._num_pauses = [0] * (len(PAUSE_BOUNDS_S) + 1)
        self._pause_s = 0.0
        self._copied_bytes = 0

    def ended(self, outcome: str) -> None:
        """Record the end of a move, with its outcome (`MOVE_OUTCOMES`)."""
        self._num_moves[outcome] += 1

    def paused(self, seconds: float) -> None:
        """Record that no iteration began for this number of seconds."""
        self._num_pauses[bisect_left(PAUSE_BOUNDS_S, seconds)] += 1
        self._pause_s += seconds

    def copied(self, num_bytes: int) -> None:
        """Record that pages were copied."""
        self._copied_bytes += num_bytes

    @property
    def stats(self) -> MovesStats:
        """The totals in the form of heartbeats."""
        return MovesStats(dict(self._num_moves), self._copied_bytes, list(self._num_pauses), self._pause_s)
