"""Listening for what is about to be said, instead of falling asleep: waking up takes longer.

Owns: how long that is worth it. Does not know: who speaks.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable
from ctypes import CDLL, c_int, c_int64
from pathlib import Path
from selectors import EpollSelector, SelectorKey

from mooncake.native import load_or_do_without

LISTEN_S = 300e-6
_MOST_SKIPPED = 64


@functools.cache
def _native() -> CDLL | None:
    """None where there is no compiler: then the interpreter asks, and hears of it some microseconds later."""
    library = load_or_do_without(Path(__file__).with_suffix(".cpp"), "what comes is noticed more slowly")
    if library is None:
        return None
    library.listen_to.argtypes = (c_int, c_int64)
    library.listen_to.restype = c_int
    return library


class Patience:
    """Whenever listening was of no use, it is tried half as often."""

    def __init__(self) -> None:
        self._num_skipped = self._num_to_skip = 0
        self._native = _native()

    def listen(self, fd: int, has_come: Callable[[], bool], for_s: float = LISTEN_S) -> bool:
        """Whether it has come. That is asked when `fd` can be read."""
        if self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        now_s = time.perf_counter()
        until_s = now_s + for_s
        while now_s < until_s:
            if self._is_readable(fd, until_s - now_s) and has_come():
                self._num_to_skip = 0
                return True
            now_s = time.perf_counter()
        self._num_to_skip = min(2 * self._num_to_skip + 1, _MOST_SKIPPED)
        return False

    def _is_readable(self, fd: int, within_s: float) -> bool:
        """Whether it may be."""
        if self._native is not None:
            return bool(self._native.listen_to(fd, int(1e9 * within_s)))
        os.sched_yield()  # whoever is to say it may have been woken on this very core
        return True


class _ListeningSelector(EpollSelector):
    """One that listens a moment before it waits."""

    def __init__(self) -> None:
        super().__init__()
        self._patience = Patience()
        self._events: list[tuple[SelectorKey, int]] = []

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if (timeout is None or timeout > LISTEN_S) and self._patience.listen(self.fileno(), self._has_events):
            return self._events
        return super().select(timeout)

    def _has_events(self) -> bool:
        self._events = super().select(0)
        return bool(self._events)


def listening_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a process that others wait for."""
    return asyncio.SelectorEventLoop(_ListeningSelector())
