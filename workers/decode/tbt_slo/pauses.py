"""Pauses between two iterations, in which prompts are prefilled on the batch's cores.

If prefill and decode share cores, a small batch that is decoded without pauses delays the prompts that would
fill the batch. An iteration reads all weights even for few sequences. So fewer and fuller iterations draw the
same tokens with less work, and prefill gets the saved time.

Owns: the length of pauses, the number of prompts that are prefilled. Does not know: cores, computations.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mooncake.messages.costs import TBT_SLO_SHARE
from workers.decode.batching.iterations import PlannedChunk
from workers.decode.tbt_slo.tbt import IterationPredictors

MAX_PAUSE_S = 0.1


def pause_s(
    num_decoded: int, num_prefilled: int, iteration_s: float | None, tbt_slo_s: float | None
) -> float:
    """Return the seconds of the pause between two iterations of `num_decoded` sequences.

    Meanwhile `num_prefilled` prompts are prefilled on the same cores. There is a pause only if there are more
    prompts than sequences. Then the batch computes for `num_decoded / num_prefilled` of the time,
    but no pause is longer than `MAX_PAUSE_S` or the SLO allow. `iteration_s` is the predicted seconds of an
    iteration, None if unknown. `tbt_slo_s` is None without a limit.
    """
    if iteration_s is None or num_prefilled <= num_decoded:
        return 0.0
    limit_s = MAX_PAUSE_S if tbt_slo_s is None else min(MAX_PAUSE_S, TBT_SLO_SHARE * tbt_slo_s - iteration_s)
    return max(0.0, min(iteration_s * (num_prefilled / num_decoded - 1), limit_s))


class DecodePauses:
    """The pauses of one batch of `max_batch` sequences at most; `predictors` predict its iterations."""

    def __init__(self, predictors: IterationPredictors, max_batch: int) -> None:
        self._predictors, self._max_batch = predictors, max_batch
        self._num_prefilled = 0
        self._ended_s = -math.inf

    @contextmanager
    def prefill(self, *, shares_cores: bool) -> Iterator[None]:
        """Make a context in which a prompt is being prefilled. It counts if the prefill `shares_cores`."""
        self._num_prefilled += shares_cores
        try:
            yield
        finally:
            self._num_prefilled -= shares_cores

    def ended(self, at_s: float) -> None:
        """Record that an iteration ended at `at_s`, by the clock of `now_s` in `remaining_s`."""
        self._ended_s = at_s

    def remaining_s(self, chunks: Sequence[PlannedChunk], now_s: float, *, is_running: bool) -> float:
        """Return the seconds by which the next iteration, over `chunks`, is still to be delayed.

        An iteration with a prompt is not delayed: it is prefill itself, and its chunks fill the time up to
        the SLO. The result counts from `now_s` or, if an iteration is running, from the end of that
        iteration.
        """
        if not self._num_prefilled or any(chunk.of_prompt for chunk in chunks):
            return 0.0
        decoded = [chunk.sequence for chunk in chunks]
        num_tokens = sum(len(sequence.tokens) for sequence in decoded)
        slos_s = [sequence.tbt_slo_s for sequence in decoded if sequence.tbt_slo_s is not None]
        iteration_s = self._predictors.tbt.predict_s(len(decoded), num_tokens)
        num_joining = min(self._num_prefilled, self._max_batch - len(decoded))
        pause = pause_s(len(decoded), num_joining, iteration_s, min(slos_s, default=None))
        return pause if is_running else max(0.0, self._ended_s + pause - now_s)
