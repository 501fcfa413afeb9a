"""The check that the other end of a link between two stages is alive.

Owns: the count of silent beats. Does not know: messages, sockets.
"""

import asyncio
from collections.abc import Awaitable, Callable

from workers.errors import SessionLostError

_BEATS_PER_TIMEOUT = 5


class LinkPulse:
    """The pulse of a link: `beat` runs beside the loop that receives, which calls `heard` for each message.

    Silence is counted in beats, not in seconds: while this process is held up it counts no beats, and before
    it counts the next beat it reads the waiting messages.
    """

    def __init__(self, who: str, timeout_s: float) -> None:
        self.interval_s = timeout_s / _BEATS_PER_TIMEOUT
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
            if self._num_silent_beats > _BEATS_PER_TIMEOUT:
                raise SessionLostError(f"{self._who} has been silent for {self._timeout_s:g} s")
