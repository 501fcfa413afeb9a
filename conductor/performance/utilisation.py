"""The measured utilisation of instances, U = C / Cmax + M / Mmax (BanaServe, section 4.4.1, equation 32).

C is the time spent computing and M the bytes in use, as heartbeats report them; queues do not count. A decode
instance computes all the time even with one request. So its C is the time that its tokens would take in full
batches. Cmax is the elapsed time, for both stages.

Owns: these figures by instance. Does not know: decisions about roles, predictions of loads.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.workers import Role

_WEIGHT = 0.5
"""The weight of the latest heartbeat in the moving averages."""


class Used(NamedTuple):
    """The shares of an instance's compute and memory in use, from 0 to 1 each."""

    compute: float
    memory: float

    @property
    def utilisation(self) -> float:
        """The utilisation U, from 0 to 2."""
        return self.compute + self.memory


@dataclass(slots=True)
class _Totals:
    at_s: float
    prefill_s: float
    num_tokens: int
    used: Used | None = None


@dataclass(slots=True)
class Utilisation:
    """The utilisation, by name, of each instance that has sent at least two heartbeats."""

    _totals: dict[str, _Totals] = field(default_factory=dict)

    def learn(
        self, name: str, role: Role, heartbeat: Heartbeat, num_device_pages: int, token_s: float, now_s: float
    ) -> Used | None:
        """Record a heartbeat, and return the utilisation of its instance; None while too little is known.

        Args:
            name: The name of the instance.
            role: The instance's role.
            heartbeat: The instance's latest heartbeat.
            num_device_pages: The number of its device pages.
            token_s: Seconds per token in a full batch.
            now_s: The time.
        """
        before = self._totals.get(name)
        new = _Totals(now_s, heartbeat.prefill_s, heartbeat.decode.num_tokens)
        self._totals[name] = new
        if before is None or now_s <= before.at_s or new.num_tokens < before.num_tokens:
            return None
        seconds = now_s - before.at_s
        busy_s = max(0.0, new.prefill_s - before.prefill_s)
        busy_s += token_s * (new.num_tokens - before.num_tokens)
        memory = 1 - heartbeat.num_free_device_pages / max(1, num_device_pages)
        if role is Role.PREFILL:
            memory = max((of.num_used / max(1, of.num_pages) for of in heartbeat.pools.values()), default=0.0)
        now = Used(min(1.0, busy_s / seconds), min(1.0, max(0.0, memory)))
        last = before.used or now
        new.used = Used(*(one + _WEIGHT * (other - one) for one, other in zip(last, now, strict=True)))
        return new.used

    def forget(self, name: str) -> None:
        """Forget an instance that has left."""
        self._totals.pop(name, None)

    def by_name(self) -> dict[str, Used]:
        """Return the utilisation of each instance for which it is known, by name."""
        return {name: of.used for name, of in self._totals.items() if of.used is not None}

    def of(self, name: str) -> Used | None:
        """Return the utilisation of an instance; None while too little is known."""
        totals = self._totals.get(name)
        return None if totals is None else totals.used
