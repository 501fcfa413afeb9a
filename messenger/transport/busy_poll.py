"""An event loop that busy polls before it sleeps, as waking up takes longer than most answers.

Owns: the decision when to busy poll. Does not know: the events.
"""

import asyncio
import os
import time
from collections.abc import Callable
from selectors import EpollSelector, SelectorKey

_MOST_SKIPPED = 64
"""The most sleeps in a row without a busy poll, after many polls without an event."""
_CROWDED_S = 1e-3
"""A busy poll that ends this many seconds late shows that other processes have had the processor."""
_CROWDED_GROWTH = 4
"""The factor by which the number of sleeps without a busy poll grows while others want the processor."""


class Backoff:
    """The decision whether to busy poll before a sleep.

    After each poll without an event, polls become half as frequent. Where other processes want the processor,
    polls are rarer still: the scheduler lets a process that polls wait behind the other processes, but runs a
    process that is woken up before them.
    """

    def __init__(self) -> None:
        self._num_skipped = self._num_to_skip = 0
        self._is_crowded = False

    def may_poll(self) -> bool:
        """Return whether to busy poll before this sleep."""
        if self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        return True

    def polled(self, *, was_useful: bool, late_s: float) -> None:
        """Record the end of a busy poll, and whether the poll found an event.

        `late_s`: seconds from the poll's deadline to its end; negative if the poll ended before its deadline.
        """
        self._is_crowded = late_s > _CROWDED_S
        if self._is_crowded:
            self._num_to_skip = min(_CROWDED_GROWTH * (self._num_to_skip + 1), _MOST_SKIPPED)
        elif was_useful:
            self._num_to_skip = 0
        else:
            self._num_to_skip = min(2 * self._num_to_skip + 1, _MOST_SKIPPED)

    def slept_briefly(self) -> None:
        """Record that a sleep ended so soon that a busy poll would have seen its event."""
        if not self._is_crowded:
            self._num_to_skip = 0


class BusyPollSelector(EpollSelector):
    """A selector that busy polls for `poll_s` seconds before it sleeps; 0: never."""

    def __init__(self, poll_s: float, now_s: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.backoff = Backoff()
        self._poll_s = poll_s
        self._now_s = now_s

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Return the events that are ready within `timeout` seconds; with None, as soon as there are any."""
        if timeout is not None and timeout <= self._poll_s:
            return super().select(timeout)
        begun_s = self._now_s()
        if self._poll_s and self.backoff.may_poll():
            until_s = begun_s + self._poll_s
            while not (events := super().select(0)) and self._now_s() < until_s:
                os.sched_yield()  # the other end may have been woken up on this very core
            now_s = self._now_s()
            self.backoff.polled(was_useful=bool(events), late_s=now_s - until_s)
            if events:
                return events
            if timeout is not None:
                timeout = max(0.0, timeout - (now_s - begun_s))
            begun_s = now_s
        events = super().select(timeout)
        if self._now_s() - begun_s < self._poll_s:
            self.backoff.slept_briefly()
        return events


def event_loop(poll_s: float) -> asyncio.SelectorEventLoop:
    """Return an event loop that busy polls for `poll_s` seconds before it sleeps.

    Such a loop is for a process whose answers other processes wait for.
    """
    return asyncio.SelectorEventLoop(BusyPollSelector(poll_s))
