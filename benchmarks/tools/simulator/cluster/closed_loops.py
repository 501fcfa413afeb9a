"""Closed loops at a simulated cluster, one after the other.

Owns: which request is submitted when another one has ended. Does not know: clusters.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from benchmarks.tools.traces.request import TraceRequest

_PAUSE_S = 1.0
"""Seconds between two loops."""


class ClosedLoop(NamedTuple):
    """Requests of which `concurrency` are in the cluster at any time. Their arrival times do not matter."""

    concurrency: int
    requests: Sequence[TraceRequest]


class ClosedLoops:
    """A feed that submits the requests of each loop. `submit` gets them, numbered from 1 over all loops."""

    def __init__(
        self,
        clock: Clock,
        loops: Iterable[ClosedLoop],
        block_tokens: int,
        submit: Callable[[SimulatedRequest], None],
    ) -> None:
        self._clock, self._block_tokens, self._submit = clock, block_tokens, submit
        self._loops = deque(loops)
        self._waiting: deque[TraceRequest] = deque()
        self._num_open = self.num_submitted = 0
        clock.at(0.0, self._begin_next)

    @property
    def is_over(self) -> bool:
        """Whether all requests have been submitted."""
        return not self._loops and not self._waiting

    def ended(self) -> None:
        """Record that a request has ended, and submit the next one."""
        self._num_open -= 1
        if self._waiting:
            self._submit_next()
        elif self._loops and not self._num_open:
            self._clock.after(_PAUSE_S, self._begin_next)

    def _begin_next(self) -> None:
        loop = self._loops.popleft()
        self._waiting.extend(loop.requests)
        for _ in range(min(loop.concurrency, len(loop.requests))):
            self._submit_next()

    def _submit_next(self) -> None:
        self._num_open += 1
        self.num_submitted += 1
        request = self._waiting.popleft()._replace(arrival_s=self._clock.now_s)
        self._submit(SimulatedRequest.of(self.num_submitted, request, self._block_tokens))
