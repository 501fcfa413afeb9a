"""Simulated clusters of coupled instances, without a Conductor.

Owns: which instance gets a request. Does not know: what an instance does with it.
"""

from collections.abc import Iterable

from benchmarks.tools.simulator.cluster.cache import SimulatedPool
from benchmarks.tools.simulator.cluster.coupled import CoupledInstance, least_loaded, num_pages_of
from benchmarks.tools.simulator.cluster.feed import Feed
from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.requests import Outcome, Results, SimulatedRequest
from benchmarks.tools.simulator.cluster.shape import InstanceShape
from benchmarks.tools.traces.request import TraceRequest


class CoupledCluster:
    """A cluster of instances that prefill and decode.

    Each request goes to the instance with the fewest requests. `chunk_tokens` is as in `CoupledInstance`. An
    instance's prefix cache has the device memory that the weights leave.
    """

    def __init__(
        self,
        shape: InstanceShape,
        num_instances: int,
        chunk_tokens: int | None,
        max_prefill_tokens: int = 8192,
    ) -> None:
        self.clock = Clock()
        self.results = Results()
        self._block_tokens = shape.block_tokens
        self.instances = [
            CoupledInstance(
                self.clock,
                shape.costs,
                SimulatedPool(self.clock, shape.num_device_blocks, shape.eviction),
                shape.max_batch,
                chunk_tokens,
                max_prefill_tokens,
                self._ended,
            )
            for _ in range(num_instances)
        ]

    def run(self, load: Iterable[TraceRequest]) -> Results:
        """Run all requests of `load` to their ends, and return the results."""
        Feed(self.clock, load, self._block_tokens, self._submit)
        self.clock.run()
        return self.results

    def _submit(self, request: SimulatedRequest) -> None:
        instance = least_loaded(self.instances)
        if num_pages_of(request) > instance.pool.num_pages:
            self.results.end(request, Outcome.REJECTED, self.clock.now_s)
        else:
            instance.submit(request)

    def _ended(self, request: SimulatedRequest) -> None:
        self.results.end(request, Outcome.FINISHED, self.clock.now_s)
