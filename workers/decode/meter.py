"""Counters of decoding for heartbeats, and the predictors of iterations.

Owns: the counters. Does not know: who reads them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

from mooncake.messages.heartbeats import DecodeStats, MixedIterations
from workers.decode.batching.iterations import Iteration
from workers.decode.tbt_slo.tbt import IterationPredictors


class DecodeMeter:
    """Counters of one session; `num_...` are totals since the session began."""

    def __init__(self) -> None:
        self.predictors = IterationPredictors()
        self.num_inlined = self.num_not_inlined = 0
        self.num_prompt_tokens: Counter[str] = Counter()
        """Tokens of inlined prompts whose prefill has ended, by source (`PREFILL_SOURCES`)."""
        self.num_preemptions: Counter[str] = Counter()
        self.num_refusals = 0
        self.num_sealed_blocks = 0
        self.num_unsealed = 0
        self._num_iterations = self._num_tokens = 0
        self._mixed = MixedIterations()
        self._forward_s = self._host_s = self._bubble_s = self._pause_s = 0.0
        self._last_ended_s: float | None = None
        self._has_paused = False
        """Whether the next iteration has been delayed on purpose since the latest iteration ended."""

    @contextmanager
    def host_time(self) -> Iterator[None]:
        """Make a context that measures the processor time of planning and sending.

        Time in which the thread waits does not count.
        """
        began_s = thread_time()
        yield
        self._host_s += thread_time() - began_s

    def ended(self, iteration: Iteration) -> None:
        """Record the times of an iteration that has ended."""
        seconds = iteration.ended_s - iteration.began_s
        self.predictors.observe(
            iteration.num_decoded + iteration.num_decoded_beside,
            iteration.num_kv_tokens + iteration.num_kv_tokens_beside,
            iteration.num_prompt_tokens,
            iteration.num_prompt_pairs,
            seconds,
        )
        self._num_iterations += 1
        self._num_tokens += iteration.num_tokens
        forward_s = iteration.forward_s
        self._forward_s += forward_s
        if iteration.num_prompt_tokens:
            mixed = self._mixed
            self._mixed = MixedIterations(
                mixed.num_iterations + 1,
                mixed.num_tokens + iteration.num_tokens,
                mixed.forward_s + forward_s,
                mixed.num_prompt_tokens + iteration.num_prompt_tokens,
            )
        self._host_s += iteration.forward_began_s - iteration.began_s
        if self._last_ended_s is not None:
            gap_s = max(0.0, iteration.began_s - self._last_ended_s)  # none between two that overlap
            self._bubble_s += 0.0 if self._has_paused else gap_s
            self._pause_s += gap_s if self._has_paused else 0.0
        self._last_ended_s, self._has_paused = iteration.ended_s, False

    def inlined(self, num_tokens_by_source: Counter[str]) -> None:
        """Record that an inlined prompt has been computed."""
        self.num_inlined += 1
        self.num_prompt_tokens += num_tokens_by_source

    def pauses(self) -> None:
        """Record that the next iteration is delayed for prompts that are being prefilled."""
        self._has_paused = True

    def idle(self) -> None:
        """Record that no sequence is being decoded. An idle device's time does not count as a bubble."""
        self._last_ended_s = None

    @property
    def stats(self) -> DecodeStats:
        """The totals in the form of heartbeats."""
        return DecodeStats(
            num_iterations=self._num_iterations,
            num_tokens=self._num_tokens,
            forward_s=self._forward_s,
            host_s=self._host_s,
            bubble_s=self._bubble_s,
            pause_s=self._pause_s,
            num_preemptions=dict(self.num_preemptions),
            num_refusals=self.num_refusals,
            num_sealed_blocks=self.num_sealed_blocks,
            num_unsealed=self.num_unsealed,
            num_inlined=self.num_inlined,
            num_not_inlined=self.num_not_inlined,
            mixed=self._mixed,
        )
