"""The virtual clock, which runs actions at their times. Actions of one time run in the order of planning.

Owns: time. Does not know: the actions.
"""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

Action = Callable[..., None]


class Clock:
    """A virtual clock. `now_s` is the time of the action that is running."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._planned: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Action, *arguments: Any) -> None:
        """Plan an action for second `time_s`. An action for a past time runs at the present time."""
        heapq.heappush(self._planned, (max(time_s, self.now_s), next(self._numbers), action, arguments))

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Plan an action in `delay_s` seconds."""
        heapq.heappush(self._planned, (self.now_s + delay_s, next(self._numbers), action, arguments))

    def run(self) -> None:
        """Run until nothing is planned."""
        planned, pop = self._planned, heapq.heappop
        while planned:
            self.now_s, _, action, arguments = pop(planned)
            self.num_events += 1
            action(*arguments)
