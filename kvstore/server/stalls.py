"""The deadlines of a client's transfers, and of pages that are reserved for a silent client.

Owns: when a client stalls. Does not know: what is transferred.
"""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

_GRACE_S = 30.0
"""Seconds that a transfer may take in addition to the time for its bytes."""
_LEAST_BYTES_PER_S = 4 << 20
"""Speed of the slowest permitted transfer, in bytes a second.

A transfer may take `_GRACE_S` plus its time at this speed.
"""
_IDLE_S = 120.0
"""Seconds for which pages stay reserved for a silent client."""
_WATCH_S = 5.0
"""Seconds between two checks for a stall."""


class StallWatch:
    """The watch over one connection.

    A transfer sets `receive_due_s` or `send_due_s` to its deadline, and to None at its end.

    Args:
        on_stall: Ends the connection.
        holds_pages: Returns whether pages are reserved for the client.
    """

    def __init__(self, on_stall: Callable[[], None], holds_pages: Callable[[], bool]) -> None:
        self._on_stall, self._holds_pages = on_stall, holds_pages
        self._loop = asyncio.get_running_loop()
        self.receive_due_s: float | None = None
        self.send_due_s: float | None = None
        self._last_message_s = self._loop.time()
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def is_watching(self) -> bool:
        """Whether the watch has been started."""
        return self._next_look is not None

    def due_s(self, num_bytes: int) -> float:
        """Return the event loop's time at which a transfer that begins now must have ended."""
        return self._loop.time() + longest_s(num_bytes)

    def heard(self) -> None:
        """Record that a message has arrived."""
        self._last_message_s = self._loop.time()

    def start(self) -> None:
        """Check for a stall now, and then periodically."""
        now_s = self._loop.time()
        stalls = any(due_s is not None and due_s < now_s for due_s in (self.receive_due_s, self.send_due_s))
        if self._last_message_s + _IDLE_S < now_s:
            self._last_message_s = now_s
            stalls = stalls or self._holds_pages()
        if stalls:
            log.warning("a client on another host stalls; its connection is ended")
            self._on_stall()
        self._next_look = self._loop.call_later(_WATCH_S, self.start)

    def stop(self) -> None:
        """End the watch."""
        if self._next_look is not None:
            self._next_look.cancel()


def longest_s(num_bytes: int) -> float:
    """Return the seconds that a transfer of `num_bytes` may take."""
    return _GRACE_S + num_bytes / _LEAST_BYTES_PER_S
