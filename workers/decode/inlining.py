"""Which prompts the decode instance computes itself, in an iteration of its batch (Mooncake, section 5).

A short prompt is not worth a way over a prefill instance, if what of it is to be computed fits into one pass
and the batch keeps its time between tokens.

Owns: the rule, and what a prompt's token costs in an iteration. Does not know: the clock, pools, requests.
"""

DECAY = 0.9


class PromptCost:
    """Seconds that a token of a prompt adds to an iteration: a mean that follows the machine."""

    def __init__(self) -> None:
        self._seconds = self._num_tokens = 0.0

    def observe(self, num_tokens: int, added_s: float) -> None:
        """An iteration with so many tokens of prompts took so much longer than one without."""
        self._seconds = DECAY * self._seconds + max(0.0, added_s)
        self._num_tokens = DECAY * self._num_tokens + num_tokens

    def predict_s(self, num_tokens: int) -> float | None:
        """What so many tokens add; None before the first observation."""
        return num_tokens * self._seconds / self._num_tokens if self._num_tokens else None


def is_inlined(
    num_tokens: int, max_tokens: int, batch_s: float | None, prompt_s: float | None, tbt_slo_s: float | None
) -> bool:
    """Whether a prompt is inlined: with those inlined before it, `num_tokens` are to be computed then.

    `max_tokens`: of one pass. `batch_s`: of an iteration without them, 0 if nobody else is decoded, and
    `prompt_s`: what they add; None for what is not known. `tbt_slo_s`: what both may take, None if anything.
    """
    if num_tokens > max_tokens:
        return False
    if tbt_slo_s is None or batch_s == 0:
        return True
    if batch_s is None or prompt_s is None:
        return False
    return batch_s + prompt_s <= tbt_slo_s
