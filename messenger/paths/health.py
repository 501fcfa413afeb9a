"""Health of a path: a path that connects and then carries nothing is not used for a while.

A path is judged by how its lanes end. It is tried again after a pause that grows each time. Other paths carry
its load meanwhile.

Owns: when a path backs off. Does not know: connections, clocks.
"""

import math
from dataclasses import dataclass
from typing import Final

from messenger.transport.transports import Remedy

MOST_USELESS_LANES: Final = 3
"""A path backs off after this number of lanes lost in a row without an answer. One or two may be chance."""
FIRST_PAUSE_S: Final = 2.0
"""Seconds of the first backoff, in which a switch or a driver may restart."""
LONGEST_PAUSE_S: Final = 60.0
"""Seconds of the longest backoff. A repaired path is tried again after this time at the latest."""
_MOST_BACKOFFS: Final = math.ceil(math.log2(LONGEST_PAUSE_S / FIRST_PAUSE_S))
"""The number of doublings after which the first pause reaches the longest pause."""


@dataclass(slots=True)
class PathHealth:
    """The health of one path, shared by its lanes. All times are of one clock."""

    num_useless: int = 0
    """The number of lanes in a row that were lost without an answer, although requests were sent."""
    num_backoffs: int = 0
    """The number of backoffs in a row."""
    until_s: float = 0.0
    """The end of the present backoff, in seconds of the caller's clock."""

    def pause_s(self, now_s: float) -> float:
        """Return the seconds until the path may be used."""
        return max(0.0, self.until_s - now_s)

    def failed(self, now_s: float) -> None:
        """Record that no lane came up: the connection, the handshake or the trial write has failed."""
        if not self.pause_s(now_s):
            self._back_off(now_s)

    def lost(
        self, now_s: float, held_s: float, remedy: Remedy | None, *, was_asked: bool, has_answered: bool
    ) -> bool:
        """Record the loss of a lane `held_s` seconds after its beginning.

        `remedy` is None if the transport knows none. `was_asked`: whether the lane got a request.
        `has_answered`: whether the lane completed a request. Returns whether the path backs off now.
        """
        if self.pause_s(now_s):
            return False  # lost together with lanes that made the path back off
        if has_answered:
            self.num_useless = 0
            if held_s > LONGEST_PAUSE_S:
                self.num_backoffs = 0
        elif was_asked:
            self.num_useless += 1
        if remedy is not Remedy.OTHER_PATH and self.num_useless < MOST_USELESS_LANES:
            return False
        self._back_off(now_s)
        return True

    def _back_off(self, now_s: float) -> None:
        self.until_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self.num_backoffs)
        self.num_backoffs = min(self.num_backoffs + 1, _MOST_BACKOFFS)
