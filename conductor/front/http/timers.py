"""The times for which a server waits for its clients, and a timer for them.

Owns: the kinds of waits, a deadline of the event loop. Does not know: how long each wait is
(`conductor.front.process.server`), what happens when a deadline is missed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds for which a server waits for a client."""

    request_s: float
    """Seconds from a connection's start, or from a request's first byte, to the request's last byte."""
    send_s: float
    """Seconds in which the client must read at least a part of the bytes that wait for it."""
    idle_s: float
    """Seconds after a response in which the next request must begin, or the connection is closed."""


class Timer:
    """A deadline that can be started and stopped."""

    __slots__ = ("_handle",)

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[..., None], *args: Any
    ) -> None:
        """Start the timer, which calls `callback` with `args` after `delay_s` seconds.

        A timer that runs already is left as it is. The callback must stop the timer.
        """
        if self._handle is None:
            self._handle = loop.call_later(delay_s, callback, *args)

    def stop(self) -> None:
        """Cancel the deadline. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
