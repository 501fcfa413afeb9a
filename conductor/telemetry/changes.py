"""The changes of instances over time, for the dashboard: their coming and going, their roles and states.

Owns: the latest changes. Does not know: why an instance changes, the clock.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from conductor.view.instances import Instance
from mooncake.messages.workers import InstanceState, Role

NUM_KEPT = 400


class InstanceChange(NamedTuple):
    """An instance's role and state from one moment on. Both are None once the instance has gone."""

    at_s: float
    instance: str
    role: Role | None
    state: InstanceState | None
    next_role: Role | None = None
    """The role to which the instance switches; None if it does not switch."""


class InstanceChanges:
    """The latest changes of instances, oldest first."""

    def __init__(self) -> None:
        self.latest: deque[InstanceChange] = deque(maxlen=NUM_KEPT)
        self._now: dict[str, tuple[Role, InstanceState, Role | None]] = {}

    def observe(self, instances: Iterable[Instance], now_s: float) -> None:
        """Record the changes since the last call. `instances` are all registered instances."""
        now = {
            one.name: (one.role, one.state, None if one.emptying is None else one.emptying.next_role)
            for one in instances
        }
        for name in self._now.keys() - now.keys():
            self.latest.append(InstanceChange(now_s, name, None, None))
        for name, what in now.items():
            if self._now.get(name) != what:
                self.latest.append(InstanceChange(now_s, name, *what))
        self._now = now
