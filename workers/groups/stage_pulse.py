"""The check that the other end of a link between two stages is alive.

Owns: the count of silent beats. Does not know: messages, sockets.
"""

import asyncio
from collections.abc import Awaitable, Callable

from workers.errors import SessionLostError

MOST_INTERVAL_S = 1.0
"""The most seconds between two beats, however long the timeout is.

Beats carry pool counters that must not become old, and show that a peer has restarted its session.
"""
_FEWEST_PER_TIMEOUT = 5


def beat_interval_s(timeout_s: float) -> float:
    """Return the seconds between two beats to a peer that counts this process as lost after `timeout_s`."""
    return min(MOST_INTERVAL_S, timeout_s / _FEWEST_PER_TIMEOUT)


class LinkPulse:
    """A check that the peer of one link is alive. `beat` runs beside the receiving loop, which calls `heard`.

    Silence is counted in beats, not in seconds. While this process is held up, no beats are counted, and
    waiting messages are read before the next beat is counted.
    """

    def __init__(self, who: str, timeout_s: float) -> None:
        self.interval_s = beat_interval_s(timeout_s)
        self._most_silent_beats = round(timeout_s / self.interval_s)
        self._who, self._timeout_s = who, timeout_s
        self._num_silent_beats = 0

    def heard(self) -> None:
        """Record that a message has arrived."""
        self._num_silent_beats = 0

    async def beat(self, send: Callable[[], Awaitable[None]]) -> None:
        """Call `send` at every beat. Raises `SessionLostError` after `timeout_s` seconds of silence."""
        while True:
            await send()
            await asyncio.sleep(self.interval_s)
            self._num_silent_beats += 1
            if self._num_silent_beats > self._most_silent_beats:
                raise SessionLostError(f"{self._who} has been silent for {self._timeout_s:g} s")
