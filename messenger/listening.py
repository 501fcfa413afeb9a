"""Listening for what is about to be said, instead of falling asleep: waking up takes longer.

Owns: how long that is worth it. Does not know: who speaks.
"""

import asyncio
import os
import time
from collections.abc import Callable
from selectors import EpollSelector, SelectorKey

LISTEN_S = 300e-6
_MOST_SKIPPED = 64


class Patience:
    """Whenever listening was of no use, it is tried half as often."""

    def __init__(self) -> None:
        self._num_skipped = self._num_to_skip = 0

    def listen(self, has_come: Callable[[], bool], for_s: float = LISTEN_S) -> bool:
        """Whether it has come."""
        if self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        until_s = time.perf_counter() + for_s
        while time.perf_counter() < until_s:
            if has_come():
                self._num_to_skip = 0
                return True
            os.sched_yield()  # whoever is to say it may have been woken on this very core
        self._num_to_skip = min(2 * self._num_to_skip + 1, _MOST_SKIPPED)
        return False


class _ListeningSelector(EpollSelector):
    """One that listens a moment before it waits."""

    def __init__(self) -> None:
        super().__init__()
        self._patience = Patience()
        self._events: list[tuple[SelectorKey, int]] = []

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if (timeout is None or timeout > LISTEN_S) and self._patience.listen(self._has_events):
            return self._events
        return super().select(timeout)

    def _has_events(self) -> bool:
        self._events = super().select(0)
        return bool(self._events)


def listening_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a process that others wait for."""
    return asyncio.SelectorEventLoop(_ListeningSelector())
