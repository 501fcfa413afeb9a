"""A deadline that may move with every message. Moving it needs no new timer.

Owns: the timer. Does not know: the event that is awaited.
"""

import asyncio
from collections.abc import Callable


def _nothing() -> None:
    """Do nothing, as the deadline is closed."""


class Deadline:
    """A deadline after which `missed` is called.

    As a context manager, the deadline is set while its body runs.
    """

    def __init__(self, timeout_s: float, missed: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._missed = missed
        self._loop = asyncio.get_running_loop()
        self._due_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Expect the event within `timeout_s` seconds from now."""
        self._due_s = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._look)

    def clear(self) -> None:
        """Expect no event for now."""
        self._due_s = None

    def close(self) -> None:
        """Stop for good, and drop the callback, so that no reference cycle is left."""
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
