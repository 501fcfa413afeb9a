"""The expected lengths of answers, which are unknown when requests arrive.

Requests with similar prompts and limits have similar answers. An answer that is still being decoded counts as
at least as long as it is now (Kaplan and Meier, 1958). Without this rule the mean would be too small, as
short answers end first. Only the latest ends are remembered. An answer that began before the oldest
remembered end counts only from the length that it had at that time (left truncation: Turnbull, 1976).
Without this rule long answers would count too often.

Owns: the lengths of the latest answers by kind. Does not know: requests, instances, the clock.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_NUM_RECENT = 64
"""The most answers that are remembered of each kind."""
_NUM_KINDS = 256
"""The most kinds that are remembered; the kind that was updated least recently is dropped first."""
_FEWEST_OF_KIND = 6
"""The number of ended answers of a kind below which the answers of all kinds are used."""


class AnswerKind(NamedTuple):
    """A class of answers: those whose prompts and token limits are of similar length.

    `prompt` and `most` are the numbers of binary digits of the prompt's length and of the limit.
    """

    prompt: int
    most: int

    @classmethod
    def of(cls, num_prompt_tokens: int, max_tokens: int) -> "AnswerKind":
        """Return the kind of a request."""
        return cls(num_prompt_tokens.bit_length(), max_tokens.bit_length())


class RunningAnswer(NamedTuple):
    """An answer that is being decoded or has ended. Times are in seconds of the Conductor's clock."""

    kind: AnswerKind
    began_s: float
    """The time of the answer's first token."""
    num_tokens: float
    """The answer's tokens at `at_s`."""
    at_s: float
    """The time at which the answer has `num_tokens`: now, or the time of its end."""

    def num_tokens_at(self, past_s: float) -> float:
        """Return the tokens that the answer had at an earlier time, if they were drawn at an even pace."""
        share = (past_s - self.began_s) / max(self.at_s - self.began_s, 1e-9)
        return self.num_tokens * min(max(share, 0.0), 1.0)


class AnswerLengths:
    """The mean lengths of answers, by kind."""

    def __init__(self) -> None:
        self._by_kind: OrderedDict[AnswerKind, deque[RunningAnswer]] = OrderedDict()
        self._all: deque[RunningAnswer] = deque(maxlen=_NUM_RECENT)

    def learn(self, answer: RunningAnswer) -> None:
        """Record the length of an answer that has ended."""
        self._all.append(answer)
        self._by_kind.setdefault(answer.kind, deque(maxlen=_NUM_RECENT)).append(answer)
        self._by_kind.move_to_end(answer.kind)
        if len(self._by_kind) > _NUM_KINDS:
            self._by_kind.popitem(last=False)

    def means(
        self, kinds: Iterable[AnswerKind], running: Iterable[RunningAnswer], since_s: float
    ) -> dict[AnswerKind, float]:
        """Return the expected length in tokens of each kind's answers.

        Args:
            kinds: The kinds that are asked for.
            running: The answers that are being decoded.
            since_s: The time from which on the load has been the same. Running answers that began earlier are
                not used. Ended answers that began earlier are used until enough later answers have ended.
        """
        by_kind: dict[AnswerKind, list[RunningAnswer]] = {}
        for answer in running:
            if answer.began_s >= since_s:
                by_kind.setdefault(answer.kind, []).append(answer)
        return {kind: self._mean(kind, by_kind.get(kind, []), since_s) for kind in kinds}

    def _mean(self, kind: AnswerKind, running: list[RunningAnswer], since_s: float) -> float:
        recent = self._by_kind.get(kind, deque[RunningAnswer]())
        if len(recent) < _FEWEST_OF_KIND:
            recent = self._all
        if not recent and not running:
            return 1.0
        new = [answer for answer in recent if answer.began_s >= since_s]
        ended = new if len(new) >= _FEWEST_OF_KIND else recent
        known_s = recent[0].at_s if len(recent) == _NUM_RECENT else -math.inf
        """The time of the oldest remembered end; minus infinity if no end was forgotten."""
        known_from = [answer.num_tokens_at(known_s) for answer in (*ended, *running)]
        lengths = [answer.num_tokens for answer in (*ended, *running)]
        earlier = [answer.num_tokens for answer in recent if answer.began_s < since_s]
        return min(float(1 << kind.most), mean_length(lengths, len(ended), known_from, earlier))


def mean_length(
    lengths: Sequence[float],
    num_ended: int,
    known_from: Sequence[float] | None = None,
    earlier: Sequence[float] = (),
) -> float:
    """Estimate the mean length of answers if some have ended and others are still growing.

    If the longest answer has not ended, its expected length is the mean of the longer answers in `earlier`.
    Without longer answers in `earlier`, it is twice the present length.

    Args:
        lengths: The lengths so far, those of ended answers first.
        num_ended: The number of answers that have ended.
        known_from: The length of each answer at the time of the oldest remembered end. Answers that ended
            before that time are missing in `lengths`. None if no end was forgotten.
        earlier: The lengths of answers of an earlier load.
    """
    all_lengths = np.array(lengths)
    order = np.lexsort((np.arange(len(lengths)) >= num_ended, all_lengths))
    sorted_lengths, has_ended = all_lengths[order], order < num_ended
    num_at_risk = np.arange(len(lengths), 0, -1)
    if known_from is not None:
        # Answers that were not watched yet at this length do not count.
        num_later = len(lengths) - np.searchsorted(np.sort(known_from), sorted_lengths)
        num_at_risk = num_at_risk - num_later
        # The end of one answer must not count as the end of all longer answers.
        num_at_risk = np.maximum(num_at_risk, [2] * (len(lengths) - 1) + [1])
    survival = np.cumprod(1.0 - has_ended / num_at_risk)
    before = np.concatenate(([1.0], survival[:-1]))
    mean = float((before * np.diff(sorted_lengths, prepend=0.0)).sum())
    longest = float(sorted_lengths[-1])
    beyond = [length - longest for length in earlier if length > longest] or [longest]
    return mean + float(survival[-1]) * sum(beyond) / len(beyond)
