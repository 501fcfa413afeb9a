"""The local scheduler of a decode instance checks what the Conductor has placed here (Mooncake, section 3).

With the TBT that it predicts it may refuse a request until its first token leaves, and it decides which
prompts are computed here (section 5).

Owns: what a request would do to the batch. Does not know: messages, how anything is measured.
"""

from collections.abc import Iterable

from workers.decode_meter import DecodeMeter
from workers.inlining import is_inlined
from workers.sequence import Sequence


class TooSlowError(Exception):
    """With this request the batch would miss the TBT SLO."""

    def __init__(self, predicted_tbt_s: float, tbt_slo_s: float) -> None:
        super().__init__(
            f"a token would take {1000 * predicted_tbt_s:.1f} ms in this batch, at most"
            f" {1000 * tbt_slo_s:g} ms are allowed (conductor.tbt_slo_s); come back later"
        )
        self.predicted_tbt_s = predicted_tbt_s


class DoubleCheck:
    """Predicts with what `meter` has learned. `max_inline_tokens`: of one pass; 0 if nothing is inlined."""

    def __init__(self, meter: DecodeMeter, max_inline_tokens: int) -> None:
        self._meter = meter
        self._max_inline_tokens = max_inline_tokens

    def check(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Raises TooSlowError; never if nothing else is to be done, for its prediction may be outdated."""
        batch = _decoded(sequence, others)
        if sequence.tbt_slo_s is None or not batch:
            return
        predicted_s = self._predict_s(sequence, batch)
        if predicted_s is not None and predicted_s > sequence.tbt_slo_s:
            raise TooSlowError(predicted_s, sequence.tbt_slo_s)

    def inlines(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Whether the rest of its prompt, behind `num_cached_tokens`, is computed here."""
        batch = _decoded(sequence, others)
        num_tokens = sum(other.num_tokens_left for other in (*batch, sequence))
        return is_inlined(
            num_tokens,
            self._max_inline_tokens,
            self._predict_s(sequence, batch) if batch else 0.0,
            self._meter.prompt_cost.predict_s(num_tokens),
            sequence.tbt_slo_s,
        )

    def _predict_s(self, sequence: Sequence, batch: list[Sequence]) -> float | None:
        num_kv_tokens = sum(len(other.tokens) for other in (*batch, sequence))
        return self._meter.tbt.predict_s(len(batch) + 1, num_kv_tokens)


def _decoded(sequence: Sequence, others: Iterable[Sequence]) -> list[Sequence]:
    return [other for other in others if other is not sequence and other.finish_reason is None]
