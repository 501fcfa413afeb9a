"""How long a server waits for its clients.

Owns: the kinds of waits, a deadline of the event loop. Does not know: what happens when one is missed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds for which a server waits for a client."""

    request_s: float
    """Seconds from the connection, or a request's first byte, to its last byte."""
    send_s: float
    """Seconds within which the client must take a part of the bytes that wait for it."""
    idle_s: float
    """Seconds from a response to the next request, after which the connection is closed."""


class Timer:
    """A deadline that can be started and stopped."""

    __slots__ = ("_handle",)

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[..., None], *args: Any
    ) -> None:
        """Start the timer: call `callback` after `delay_s`, unless the timer runs already.

        The callback must stop the timer.
        """
        if self._handle is None:
            self._handle = loop.call_later(delay_s, callback, *args)

    def stop(self) -> None:
        """Cancel the deadline. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
