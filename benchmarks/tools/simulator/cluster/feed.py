"""The arrival of a load's requests at a simulated cluster.

Owns: the time of each arrival. Does not know: clusters.
"""

from collections.abc import Callable, Iterable, Iterator

from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from benchmarks.tools.traces.request import TraceRequest


class Feed:
    """A feed that submits each request when it arrives. It reads the load one request ahead."""

    def __init__(
        self,
        clock: Clock,
        load: Iterable[TraceRequest],
        block_tokens: int,
        submit: Callable[[SimulatedRequest], None],
    ) -> None:
        self._clock, self._block_tokens, self._submit = clock, block_tokens, submit
        self._load: Iterator[TraceRequest] = iter(load)
        self.num_submitted = 0
        self.is_over = False
        self._plan_next()

    def ended(self) -> None:
        """Record that a request has ended, which changes nothing: requests arrive at their own times."""

    def _plan_next(self) -> None:
        request = next(self._load, None)
        if request is None:
            self.is_over = True
        else:
            self._clock.at(request.arrival_s, self._arrive, request)

    def _arrive(self, request: TraceRequest) -> None:
        self.num_submitted += 1
        self._submit(SimulatedRequest.of(self.num_submitted, request, self._block_tokens))
        self._plan_next()
