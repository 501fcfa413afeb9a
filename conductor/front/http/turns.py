"""Connections over which requests have come one behind the other, and that go on with the next one.

Owns: how many of them do so before others come in between. Does not know: HTTP.
"""

import asyncio
from collections import deque
from collections.abc import Callable

MOST_AT_ONCE = 16


class Turns:
    """A few connections go on in each turn of the event loop, so that a new request is answered soon."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` soon. Needs a running event loop."""
        self._waiting.append(go_on)
        self._go_on_later()

    def _go_on_later(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_due = False
        for _ in range(min(MOST_AT_ONCE, len(self._waiting))):
            self._waiting.popleft()()
        self._go_on_later()
