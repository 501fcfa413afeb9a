"""Runs a batch on the virtual clock: one event for all steps until somebody joins or leaves.

Owns: the run that is under way. Does not know: who joins, and why.
"""

from collections.abc import Callable

from benchmarks.tools.simulator.cluster.batch import Batch, Member, StepCost
from benchmarks.tools.simulator.cluster.machines.clock import Clock


class BatchRunner:
    """`step_cost` is that of the batch as it is. `on_end(num_steps, seconds, ended members)` is called when a
    run has ended; until somebody starts another one nothing happens."""

    def __init__(
        self,
        clock: Clock,
        step_cost: Callable[[], StepCost],
        batch: Batch,
        on_end: Callable[[int, float, list[Member]], None],
    ) -> None:
        self._clock, self._step_cost, self._batch, self._on_end = clock, step_cost, batch, on_end
        self._num_steps = 0
        """Steps of the run in flight; 0 without one."""
        self._cost = StepCost(0.0, 0.0)
        self._began_s = self._extra_s = 0.0
        self._version = 0

    @property
    def is_running(self) -> bool:
        return self._num_steps > 0

    def start(self, max_steps: int | None = None, extra_s: float = 0.0) -> None:
        """Start a run until the first member ends, of at most so many steps; of one if it takes longer."""
        batch = self._batch
        if extra_s:
            max_steps = 1
        self._num_steps = batch.num_steps_to_first_end()
        if max_steps is not None:
            self._num_steps = min(self._num_steps, max_steps)
        self._cost = self._step_cost()
        self._began_s, self._extra_s = self._clock.now_s, extra_s
        self._plan_end()

    def cut(self) -> None:
        """End the run with its present step, for whose end something waits."""
        if self._num_steps > 1:
            elapsed_s = self._clock.now_s - self._began_s
            num_begun = self._cost.steps_by(self._batch.num_kv_tokens, self._batch.size, elapsed_s)
            if num_begun < self._num_steps:
                self._num_steps = num_begun
                self._plan_end()

    def _plan_end(self) -> None:
        self._version += 1
        steps_s = self._cost.steps_s(self._batch.num_kv_tokens, self._batch.size, self._num_steps)
        seconds = steps_s + self._extra_s
        self._clock.at(self._began_s + seconds, self._end, self._version, seconds)

    def _end(self, version: int, seconds: float) -> None:
        if version == self._version:
            num_steps, self._num_steps = self._num_steps, 0
            self._on_end(num_steps, seconds, self._batch.advance(num_steps, seconds))
