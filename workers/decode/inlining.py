"""Inlined prefill: prompts that a decode instance computes itself, in an iteration (Mooncake, section 5).

A short prompt does not pay for the way over a prefill instance, if the rest of it that is to be computed fits
into one pass and the batch keeps its time between tokens.

Owns: the rule, and what a prompt's token costs in an iteration. Does not know: the clock, pools, requests.
"""

DECAY = 0.9


class PromptCost:
    """The seconds that a prompt token adds to an iteration: a mean that follows the machine."""

    def __init__(self) -> None:
        self._seconds = self._num_tokens = 0.0

    def observe(self, num_tokens: int, added_s: float) -> None:
        """Learn that an iteration with `num_tokens` of prompts took `added_s` longer than one without."""
        self._seconds = DECAY * self._seconds + max(0.0, added_s)
        self._num_tokens = DECAY * self._num_tokens + num_tokens

    def predict_s(self, num_tokens: int) -> float | None:
        """Return the seconds that `num_tokens` add; None before the first observation."""
        return num_tokens * self._seconds / self._num_tokens if self._num_tokens else None


def is_inlined(
    num_tokens: int, max_tokens: int, batch_s: float | None, prompt_s: float | None, tbt_slo_s: float | None
) -> bool:
    """Return whether a prompt is inlined.

    `num_tokens` are to be computed for it and for those inlined before it, `max_tokens` is the limit of a
    pass. `batch_s` is the predicted iteration without them (0: nothing else is decoded) and `prompt_s` what
    they add; None is not known. `tbt_slo_s` limits the sum; None is no limit.
    """
    if num_tokens > max_tokens:
        return False
    if tbt_slo_s is None or batch_s == 0:
        return True
    if batch_s is None or prompt_s is None:
        return False
    return batch_s + prompt_s <= tbt_slo_s
