"""Penalties, biases and forbidden tokens: against transformers and OpenAI's formula, alone and in a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from workers.engine.logit_changes import LogitChanges, LogitRules

VOCAB_SIZE = 40
PROMPT, OUTPUT = [3, 5, 5, 7, 39], [7, 8, 8, 8, 0]


def rules(prompt: list[int] = PROMPT, bias: dict[int, float] | None = None, **wishes: Any) -> LogitRules:
    bias = bias or {}
    return LogitRules(
        repetition_penalty=wishes.get("repetition_penalty", 1.0),
        presence_penalty=wishes.get("presence_penalty", 0.0),
        frequency_penalty=wishes.get("frequency_penalty", 0.0),
        prompt_tokens=np.unique(np.array(prompt)),
        bias_tokens=np.fromiter(bias, np.int64),
        biases=np.fromiter(bias.values(), np.float32),
        bad_words=wishes.get("bad_words", ()),
        min_tokens=wishes.get("min_tokens", 0),
        stop_tokens=np.array(wishes.get("stop_tokens", ()), dtype=np.int64),
        grammar=wishes.get("grammar"),
    )


def logits_of(num_rows: int) -> torch.Tensor:
    return torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))[:num_rows] * 3


def changed(of_row: LogitRules, output: list[int] = OUTPUT) -> torch.Tensor:
    """The first row of `logits_of`, changed."""
    logits, changes = logits_of(1), LogitChanges()
    changes.add(0, of_row, output)
    changes.apply(logits)
    return logits[0]


def forbidden(of_row: LogitRules, output: list[int]) -> set[int]:
    return set(changed(of_row, output).isneginf().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    reference = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = reference(torch.tensor([PROMPT + OUTPUT]), logits_of(1))[0]
    torch.testing.assert_close(changed(rules(repetition_penalty=penalty)), expected)


def test_presence_counts_once_and_frequency_each_time_and_only_the_output() -> None:
    difference = logits_of(1)[0] - changed(rules(presence_penalty=0.5, frequency_penalty=0.25))
    expected = torch.zeros(VOCAB_SIZE)
    for token in OUTPUT:
        expected[token] = 0.5 + 0.25 * OUTPUT.count(token)
    torch.testing.assert_close(difference, expected)


def test_biases_are_added() -> None:
    difference = changed(rules(bias={3: 1.5, 20: -100.0})) - logits_of(1)[0]
    assert difference.nonzero()[:, 0].tolist() == [3, 20]
    torch.testing.assert_close(difference[[3, 20]], torch.tensor([1.5, -100.0]))


def test_bad_words_are_never_completed() -> None:
    words = rules(bad_words=[(9,), (1, 2), (4, 5, 6)])
    assert forbidden(words, []) == {9}
    assert forbidden(words, [1]) == {9, 2}
    assert forbidden(words, [2, 1, 4]) == {9}
    assert forbidden(words, [4, 5]) == {9, 6}
    assert forbidden(words, [4, 5, 5]) == {9}


def test_stop_tokens_wait_for_min_tokens() -> None:
    patient = rules(min_tokens=2, stop_tokens=[11, 12])
    assert forbidden(patient, []) == {11, 12}
    assert forbidden(patient, [1]) == {11, 12}
    assert forbidden(patient, [1, 1]) == set()


def test_a_row_does_not_depend_on_its_batch_and_others_are_not_touched() -> None:
    wishes = {
        0: rules(repetition_penalty=1.2, bad_words=[(8, 0)]),
        2: rules(bias={1: 2.0}, frequency_penalty=-1.0),
        3: rules([1], presence_penalty=2.0, repetition_penalty=0.5, min_tokens=9, stop_tokens=[0]),
        5: rules(bad_words=[(0, 4)]),
    }
    together, changes = logits_of(6), LogitChanges()
    for row, of_row in wishes.items():
        changes.add(row, of_row, OUTPUT[: row + 1])
    changes.apply(together)
    for row in range(6):
        alone = logits_of(6)[row : row + 1]
        if row in wishes:
            one = LogitChanges()
            one.add(0, wishes[row], OUTPUT[: row + 1])
            one.apply(alone)
            assert not alone.equal(logits_of(6)[row : row + 1])
        assert together[row].equal(alone[0])


def test_a_token_that_is_known_later_counts_too() -> None:
    wishes = rules(frequency_penalty=0.5, repetition_penalty=1.4, bad_words=[(8, 0, 1)])
    logits, changes = logits_of(2), LogitChanges()
    changes.add(0, wishes, OUTPUT[:-1])
    changes.extend(0, OUTPUT[-1])
    changes.extend(1, 5)  # a row that wants nothing
    changes.apply(logits)
    assert logits[0].equal(changed(wishes))
    assert logits[0, 1].isneginf()
    assert logits[1].equal(logits_of(2)[1])


class FollowsUpTo:
    """Allows tokens up to one more than the last."""

    def allowed_after(self, tokens: Sequence[int], /) -> np.ndarray:
        allowed = np.zeros(64, dtype=np.uint8)
        allowed[: (tokens[-1] if tokens else 0) + 2] = 1
        return np.packbits(allowed, bitorder="little")


def test_only_tokens_that_the_grammar_allows_are_left_whatever_their_bias() -> None:
    logits = torch.zeros(3, 37)
    changes = LogitChanges()
    changes.add(0, rules([1], grammar=FollowsUpTo()), [])
    changes.add(2, rules([1], bias={20: 100.0}, grammar=FollowsUpTo(), presence_penalty=1.0), [7])
    changes.extend(2, 8)
    changes.apply(logits)
    allowed = [row.isfinite().nonzero()[:, 0].tolist() for row in logits]
    assert allowed == [[0, 1], list(range(37)), list(range(10))]
    assert logits[2, :10].tolist() == [0, 0, 0, 0, 0, 0, 0, -1, -1, 0]
