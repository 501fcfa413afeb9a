"""Listening for what is about to be said, instead of falling asleep: waking up takes longer.

An event loop that listens asks again and again before it waits. Whoever spoke last is expected to speak next:
what it says is received within the same compiled call, ahead of the loop.

Owns: how long that is worth it. Does not know: who speaks.
"""

import asyncio
import functools
import os
import time
from collections import deque
from collections.abc import Callable
from ctypes import CDLL, c_int, c_int64
from selectors import EVENT_READ, EpollSelector, SelectorKey
from typing import Protocol

from messenger.native import SOURCES
from mooncake.native import load_or_do_without

_MOST_SKIPPED = 64
_HELD_S = 1e-3
"""listening, with what is received within it, ends no later than this after its time unless others have the
processor, who keep it for several times as long"""


@functools.cache
def _native() -> CDLL | None:
    """None where there is no compiler: then the interpreter asks, and hears of it some microseconds later."""
    library = load_or_do_without(SOURCES / "listening.cpp", "what comes is noticed more slowly")
    if library is None:
        return None
    library.listen_to.argtypes = (c_int, c_int64)
    library.listen_to.restype = c_int
    return library


def prepare() -> None:
    """Compiles the code, if that has not been done: so that no request waits for it."""
    _native()


def hears(fd: int, within_s: float) -> bool:
    """Whether `fd` can be read within that time; without a compiler, whether it may be."""
    native = _native()
    if native is not None:
        return bool(native.listen_to(fd, int(1e9 * within_s)))
    os.sched_yield()  # whoever is to say it may have been woken on this very core
    return True


class Patience:
    """Whenever listening was of no use, it is tried half as often, until it is of use again, or once it would
    have been, as far as `slept` is told.

    Where others want the processor, and not just once, it is hardly tried: who waits awake is let in behind
    them, who is woken up before them.
    """

    def __init__(self, listen_s: float, now_s: Callable[[], float] = time.perf_counter) -> None:
        """0: never."""
        self.listen_s = listen_s
        self._now_s = now_s
        self._num_skipped = self._num_to_skip = 0
        self._is_crowded = False
        """others wanted the processor when we listened"""

    def listen(
        self, hears: Callable[[float], bool], has_come: Callable[[], bool], longer_s: float = 0.0
    ) -> bool:
        """Whether it has come. That is asked whenever something has, of which `hears` tells: it waits so many
        seconds for that at most, and gives up if others want to be heard."""
        until_s = self.begin(longer_s)
        if until_s is None:
            return False
        is_there = False
        while not is_there and (left_s := until_s - self._now_s()) > 0 and hears(left_s):
            is_there = has_come()
        self.end(until_s, is_there=is_there)
        return is_there

    def begin(self, longer_s: float = 0.0) -> float | None:
        """Until when to listen, of which the `end` is to be said; None if it is not tried now."""
        if not self.listen_s:
            return None
        if self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return None
        self._num_skipped = 0
        return self._now_s() + self.listen_s + longer_s

    def end(self, until_s: float, *, is_there: bool) -> None:
        """Whether it has come that was listened for."""
        self._is_crowded = self._now_s() - until_s > _HELD_S
        if self._is_crowded:
            self._num_to_skip = min(4 * self._num_to_skip + 4, _MOST_SKIPPED)
        elif is_there:
            self._num_to_skip = 0
        else:
            self._num_to_skip = min(2 * self._num_to_skip + 1, _MOST_SKIPPED)

    def slept(self, for_s: float) -> None:
        """Until something came."""
        if for_s < self.listen_s and not self._is_crowded:
            self._num_to_skip = 0


class Speaker(Protocol):
    """Who has said something, and may say more."""

    @property
    def fileno(self) -> int: ...

    @property
    def may_listen(self) -> bool:
        """Whether somebody waits for it."""

    def listen(self, within_s: float) -> bool:
        """Whether it has, within that time; not if somebody else has. Who waits is to be told that `fileno`
        can be read."""


class Listener(EpollSelector):
    """A selector that listens a moment before it waits."""

    def __init__(self, listen_s: float) -> None:
        super().__init__()
        self.listen_s = listen_s
        self.descriptor = self.fileno()
        """that speaks for all that are watched"""
        self.speaker: Speaker | None = None
        """the latest"""
        self._patience = Patience(listen_s)
        self._has_spoken = False
        self._events: list[tuple[SelectorKey, int]] = []

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None and timeout <= self.listen_s:
            return super().select(timeout)
        if self._patience.listen(self._hears, self._has_events):
            return self._events
        begun_s = time.perf_counter()
        events = super().select(timeout)
        self._patience.slept(time.perf_counter() - begun_s)
        return events

    def _hears(self, within_s: float) -> bool:
        speaker = self.speaker
        if speaker is None or not speaker.may_listen:
            return hears(self.fileno(), within_s)
        self._has_spoken = speaker.listen(within_s)
        return self._has_spoken or hears(self.fileno(), 0)

    def _has_events(self) -> bool:
        """The speaker's is the first: what it has said may be about what others change."""
        self._events = super().select(0)
        if self._has_spoken:
            assert self.speaker is not None
            self._has_spoken, fd = False, self.speaker.fileno
            others = [(key, events) for key, events in self._events if key.fd != fd]
            self._events = [(self.get_key(fd), EVENT_READ), *others]
        return bool(self._events)


class ListeningLoop(asyncio.SelectorEventLoop):
    """An event loop for a process that others wait for."""

    time = staticmethod(time.monotonic)  # as asyncio's, without a call of its own: it is asked often
    _ready: deque[asyncio.Handle]  # asyncio's own: nobody else knows who waits for a turn
    _scheduled: list[asyncio.TimerHandle]  # a heap

    def __init__(self, listen_s: float) -> None:
        """0: it never listens."""
        self.listener = Listener(listen_s)
        super().__init__(self.listener)

    @property
    def has_work(self) -> bool:
        """Whether its next turn would be of use to anybody but who asks."""
        is_due = bool(self._scheduled) and self._scheduled[0].when() <= self.time()
        return bool(self._ready) or is_due or hears(self.listener.fileno(), 0)


def listener() -> Listener | None:
    """Of the running loop, if that listens."""
    loop = asyncio.get_running_loop()
    return loop.listener if isinstance(loop, ListeningLoop) else None


def others_wait() -> bool:
    """Whether somebody has something to do on the running loop; where that cannot be seen, it may be."""
    loop = asyncio.get_running_loop()
    return loop.has_work if isinstance(loop, ListeningLoop) else True
