"""Moves of running requests between decode instances, and the limits on how often requests move.

Owns: the value that a rule returns, hysteresis. Does not know: why a request should move, how it moves.
"""

from collections import Counter
from typing import NamedTuple

from conductor.elasticity.moves.batches import InstanceBatch
from conductor.view.decision_stats import MigrationReason

AGAIN_AFTER_S = 10.0
"""Seconds after a request's move in which the request does not move again."""
SETTLE_S = 2.0
"""Seconds after a move in which rules ignore its two instances, as their figures are older than the move."""
MOST_AT_ONCE = 4
"""The most moves that may be in flight in the cluster at the same time."""
MOST_OF_SOURCE = 1
"""The most moves that may be in flight from one instance at the same time."""


class Move(NamedTuple):
    """The move of a running request from one decode instance to another."""

    request_id: str
    source: str
    destination: str
    reason: MigrationReason


class RecentMoves:
    """The moves of the last seconds, which limit further moves.

    Limits are needed because copies take bandwidth, and because a wrong prediction would be repeated.
    """

    def __init__(self) -> None:
        self._moved_s: dict[str, float] = {}
        """The time at which each request was last ordered to move."""
        self._touched_s: dict[str, float] = {}
        """The time at which each instance was last the source or destination of a move."""

    def note(self, move: Move, now_s: float) -> None:
        """Record that a move was ordered."""
        self._moved_s[move.request_id] = now_s
        self._touched_s[move.source] = self._touched_s[move.destination] = now_s

    def forget(self, now_s: float) -> None:
        """Forget moves that are too old to matter for any limit."""
        self._moved_s = _since(self._moved_s, now_s - AGAIN_AFTER_S)
        self._touched_s = _since(self._touched_s, now_s - SETTLE_S)

    def settled(self, batches: list[InstanceBatch], now_s: float) -> list[InstanceBatch]:
        """Return the batches that rules may use: those of instances without a move in the last `SETTLE_S`.

        Requests that were ordered to move in the last `AGAIN_AFTER_S` are marked as requests that may not
        move.
        """
        return [
            batch.fixing(self._moved_s)
            for batch in batches
            if self._touched_s.get(batch.instance, -1e18) <= now_s - SETTLE_S
        ]

    def within(self, moves: list[Move], in_flight: Counter[str]) -> list[Move]:
        """Return the moves that the limits allow in addition to the migrations in flight.

        Only the first move to each destination is allowed.

        Args:
            moves: The moves that rules want, the most urgent first.
            in_flight: The number of migrations in flight by source.
        """
        kept, of_source, taken = list[Move](), in_flight.copy(), set[str]()
        for move in moves:
            if of_source.total() >= MOST_AT_ONCE:
                break
            if of_source[move.source] < MOST_OF_SOURCE and move.destination not in taken:
                of_source[move.source] += 1
                taken.add(move.destination)
                kept.append(move)
        return kept


def _since(times_s: dict[str, float], oldest_s: float) -> dict[str, float]:
    return {name: time_s for name, time_s in times_s.items() if time_s > oldest_s}
