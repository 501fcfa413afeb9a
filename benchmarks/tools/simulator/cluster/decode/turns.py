"""The queue of prefilled requests that wait for a simulated decode instance's batch to shrink.

Owns: which requests wait, and until when. Does not know: when a batch is too large, what is done with a turn.
"""

from collections import deque
from collections.abc import Callable

from benchmarks.tools.simulator.cluster.decode.sequence import Sequence
from benchmarks.tools.simulator.cluster.machines.clock import Clock


class Turns:
    """The queue for turns, first come, first served.

    Args:
        clock: The virtual clock.
        too_slow_s: Returns the predicted TBT with a sequence if it is too long, else None.
        begin: Called with a sequence that gets its turn.
        refuse: Called with a sequence whose time is over, and with the predicted TBT.
    """

    def __init__(
        self,
        clock: Clock,
        too_slow_s: Callable[[Sequence], float | None],
        begin: Callable[[Sequence], None],
        refuse: Callable[[Sequence, float], None],
    ) -> None:
        self._clock, self._too_slow_s, self._begin, self._refuse = clock, too_slow_s, begin, refuse
        self._waiting: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, time_left_s: float | None) -> None:
        """Queue a sequence. It is refused if it gets no turn within `time_left_s` seconds.

        If `time_left_s` is None, it is refused if it gets no turn at once.
        """
        self._waiting.append(sequence)
        if time_left_s is not None:
            sequence.due_s = self._clock.now_s + time_left_s
        if time_left_s is not None and time_left_s > 0:
            self._clock.after(time_left_s, self._end, sequence)
            self.take()
        else:
            self._end(sequence)

    def take(self) -> None:
        """Give turns to waiting sequences, in order, until the predicted TBT is too long."""
        while self._waiting and self._too_slow_s(self._waiting[0]) is None:
            self._begin(self._waiting.popleft())

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue. Idempotent."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def _end(self, sequence: Sequence) -> None:
        """End the wait of a sequence whose time is over, with a turn or a refusal."""
        if sequence not in self._waiting:
            return
        self._waiting.remove(sequence)
        tbt_s = self._too_slow_s(sequence)
        if tbt_s is None:
            self._begin(sequence)
        else:
            self._refuse(sequence, tbt_s)
        self.take()
