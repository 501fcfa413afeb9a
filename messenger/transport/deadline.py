"""A time by which something must have happened. It may move with every message: that costs no timer.

Owns: the timer. Does not know: what is awaited.
"""

import asyncio
from collections.abc import Callable


def _nothing() -> None:
    """Nobody awaits anything any more."""


class Deadline:
    """`missed` is called once it has passed. Also a context manager: what is within must not take longer."""

    def __init__(self, timeout_s: float, missed: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._missed = missed
        self._loop = asyncio.get_running_loop()
        self._due_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """`timeout_s` from now."""
        self._due_s = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._look)

    def clear(self) -> None:
        """Nothing is awaited now."""
        self._due_s = None

    def close(self) -> None:
        """For good. Whoever it would call may have it, and goes at once with no circle left."""
        self._missed = _nothing
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _look(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        if self._due_s <= self._loop.time():
            self._missed()
        else:
            self._timer = self._loop.call_at(self._due_s, self._look)
