"""Counters of vLLM's decoding: its prompts, and its iterations as seen in its outputs.

The Conductor learns from these counters how long an iteration takes.

Owns: the counters. Does not know: who reads them.
"""

from mooncake.messages.heartbeats import DecodeStats, MixedIterations
from mooncake.messages.requests import Ref


class DecodeMeter:
    """The totals of one session.

    An iteration brings each request one output. So a second output of a request belongs to the next
    iteration.
    """

    def __init__(self) -> None:
        self.num_inlined = self.num_not_inlined = 0
        """Two numbers of prompts.

        Those of `num_inlined` were computed by this vLLM beside decoding, those of `num_not_inlined` by
        prefill instances.
        """
        self._num_prompt_tokens = self._num_computed = 0
        """Two numbers of prompt tokens.

        `_num_computed` counts all tokens that vLLM has computed since its start, `_num_prompt_tokens` only
        those that it has computed beside decoding.
        """
        self._num_iterations = self._num_tokens = 0
        self._seconds = 0.0
        self._in_iteration: dict[Ref, int] = {}
        """Tokens of each request in the present iteration."""
        self._began_s: float | None = None
        """Time of the first output of the present iteration; None while the iteration has no requests."""

    def drew(self, ref: Ref, num_tokens: int, now_s: float) -> None:
        """Record that a request got an output of `num_tokens` tokens."""
        if ref in self._in_iteration:
            if self._began_s is not None:
                self._num_iterations += 1
                self._num_tokens += sum(self._in_iteration.values())
                self._seconds += now_s - self._began_s
            self._in_iteration, self._began_s = {}, now_s
        self._in_iteration[ref] = num_tokens
        if self._began_s is None:
            self._began_s = now_s

    def left(self, ref: Ref) -> None:
        """Record that a request has ended.

        If no other request has an output in the present iteration, the iteration is not measured, because the
        engine may be idle.
        """
        self._in_iteration.pop(ref, None)
        if not self._in_iteration:
            self._began_s = None

    def computed(self, num_tokens: int, *, as_decode: bool) -> None:
        """Record that vLLM has computed `num_tokens` prompt tokens since its start.

        `as_decode` says whether the prompt tokens since the previous call were computed beside decoding.
        """
        if as_decode:
            self._num_prompt_tokens += num_tokens - self._num_computed
        self._num_computed = num_tokens

    @property
    def stats(self) -> DecodeStats:
        """The totals in the form of heartbeats."""
        return DecodeStats(
            self._num_iterations,
            self._num_tokens,
            self._seconds,
            num_inlined=self.num_inlined,
            num_not_inlined=self.num_not_inlined,
            mixed=MixedIterations(num_prompt_tokens=self._num_prompt_tokens),
        )
