"""The expected lengths of answers, which are unknown when requests arrive.

Requests with similar prompts and limits have similar answers. Answers that are still being decoded count as
at least as long as they are now (Kaplan and Meier, 1958), so long answers are not overlooked because only
short ones have ended.

Owns: the lengths of the latest answers by kind. Does not know: requests, instances, the clock.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_NUM_RECENT = 24
"""The number of answers of a kind that are remembered."""
_NUM_KINDS = 256
_FEWEST_OF_KIND = 6
"""The number of ended answers of a kind from which on its mean is known."""


class Kind(NamedTuple):
    """Prompts of similar length with similar limits for their answers, by powers of two."""

    prompt: int
    most: int

    @classmethod
    def of(cls, num_prompt_tokens: int, max_tokens: int) -> "Kind":
        """The kind of a request."""
        return cls(num_prompt_tokens.bit_length(), max_tokens.bit_length())


class Answer(NamedTuple):
    """An answer of which some tokens have been drawn."""

    kind: Kind
    began_s: float
    """The time of its first token."""
    num_tokens: float
    """Number of tokens so far."""


class AnswerLengths:
    """The mean lengths of answers by kind."""

    def __init__(self) -> None:
        self._by_kind: OrderedDict[Kind, deque[Answer]] = OrderedDict()
        self._all: deque[Answer] = deque(maxlen=_NUM_RECENT)

    def learn(self, answer: Answer) -> None:
        """Learn from an answer that has ended."""
        self._all.append(answer)
        self._by_kind.setdefault(answer.kind, deque(maxlen=_NUM_RECENT)).append(answer)
        self._by_kind.move_to_end(answer.kind)
        if len(self._by_kind) > _NUM_KINDS:
            self._by_kind.popitem(last=False)

    def means(self, kinds: Iterable[Kind], running: Iterable[Answer], since_s: float) -> dict[Kind, float]:
        """The expected length of each kind's answers.

        Args:
            kinds: The kinds that are asked for.
            running: The answers that are being decoded.
            since_s: The time since when the load has been the same. Only answers that began after it are
            used; while few of these have ended, earlier ones are used too.
        """
        new: dict[Kind, list[float]] = {}
        for answer in running:
            if answer.began_s >= since_s:
                new.setdefault(answer.kind, []).append(answer.num_tokens)
        return {kind: self._mean(kind, new.get(kind, []), since_s) for kind in kinds}

    def _mean(self, kind: Kind, running: list[float], since_s: float) -> float:
        ended = self._by_kind.get(kind, deque[Answer]())
        if len(ended) < _FEWEST_OF_KIND:
            ended = self._all
        new = [answer.num_tokens for answer in ended if answer.began_s >= since_s]
        known = new if len(new) >= _FEWEST_OF_KIND else [answer.num_tokens for answer in ended]
        return min(float(1 << kind.most), mean_length(known, running)) if known or running else 1.0


def mean_length(ended: Sequence[float], running: Sequence[float]) -> float:
    """Estimate the mean length of answers, of which some have ended and others are still growing.

    If the longest answers have not ended, they are expected to become twice as long as they are now.
    """
    lengths = np.array([*ended, *running])
    has_ended = np.arange(len(lengths)) < len(ended)
    order = np.lexsort((~has_ended, lengths))
    lengths, has_ended = lengths[order], has_ended[order]
    num_at_risk = np.arange(len(lengths), 0, -1)
    survival = np.cumprod(1.0 - has_ended / num_at_risk)
    before = np.concatenate(([1.0], survival[:-1]))
    mean = float((before * np.diff(lengths, prepend=0.0)).sum())
    return mean + float(survival[-1] * lengths[-1])
