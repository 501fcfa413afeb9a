"""A clock that measures how long processes take, on a machine whose cores other processes use too.

Owns: the time for which the processes wait for a core. Does not know: what is measured.
"""

import time
from collections.abc import Sequence
from pathlib import Path


class CoreClock:
    """A clock that stands still while a process that could run has no core.

    Of the processes `pids`, the one whose main thread has waited longest for a core since the clock was made
    counts. With idle cores no process waits.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._stats = [Path(f"/proc/{pid}/schedstat") for pid in pids]
        self._begun_s = self._waited_s()

    def now_s(self) -> float:
        """Return the seconds since some time in the past."""
        waits_s = (now_s - begun_s for now_s, begun_s in zip(self._waited_s(), self._begun_s, strict=True))
        return time.monotonic() - max(waits_s)

    def _waited_s(self) -> list[float]:
        return [int(stat.read_text().split()[1]) / 1e9 for stat in self._stats]
