"""The run of a batch on the virtual clock: one event for all iterations until a request joins or leaves.

Owns: the run in progress. Does not know: which requests join, and why.
"""

from collections.abc import Callable

from benchmarks.tools.simulator.cluster.batch import Batch, IterationCost, Member
from benchmarks.tools.simulator.cluster.machines.clock import Clock


class BatchRunner:
    """The runner of one batch. `iteration_cost` returns the cost of an iteration of the present batch.

    `on_end(num_iterations, seconds, ended members)` is called when a run has ended. The next run begins with
    the next call of `start`.
    """

    def __init__(
        self,
        clock: Clock,
        iteration_cost: Callable[[], IterationCost],
        batch: Batch,
        on_end: Callable[[int, float, list[Member]], None],
    ) -> None:
        self._clock, self._iteration_cost, self._batch, self._on_end = clock, iteration_cost, batch, on_end
        self._num_iterations = 0
        """Iterations of the run in flight; 0 if there is none."""
        self._cost = IterationCost(0.0, 0.0)
        self._began_s = self._extra_s = 0.0
        self._version = 0

    @property
    def is_running(self) -> bool:
        return self._num_iterations > 0

    def start(self, max_iterations: int | None = None, extra_s: float = 0.0) -> None:
        """Start a run. It ends when a member ends, or after `max_iterations`.

        With `extra_s` the run is a single iteration, which takes that many seconds more.
        """
        batch = self._batch
        if extra_s:
            max_iterations = 1
        self._num_iterations = batch.num_iterations_to_first_end()
        if max_iterations is not None:
            self._num_iterations = min(self._num_iterations, max_iterations)
        self._cost = self._iteration_cost()
        self._began_s, self._extra_s = self._clock.now_s, extra_s
        self._plan_end()

    def cut(self) -> None:
        """End the run with its present iteration, because another action waits for its end."""
        if self._num_iterations > 1:
            elapsed_s = self._clock.now_s - self._began_s
            num_begun = self._cost.iterations_by(self._batch.num_kv_tokens, self._batch.size, elapsed_s)
            if num_begun < self._num_iterations:
                self._num_iterations = num_begun
                self._plan_end()

    def _plan_end(self) -> None:
        self._version += 1
        iterations_s = self._cost.iterations_s(
            self._batch.num_kv_tokens, self._batch.size, self._num_iterations
        )
        seconds = iterations_s + self._extra_s
        self._clock.at(self._began_s + seconds, self._end, self._version, seconds)

    def _end(self, version: int, seconds: float) -> None:
        if version == self._version:
            num_iterations, self._num_iterations = self._num_iterations, 0
            self._on_end(num_iterations, seconds, self._batch.advance(num_iterations, seconds))
