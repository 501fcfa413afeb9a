"""How long answers will be."""

import random

import pytest

from conductor.elasticity.answers import AnswerKind, AnswerLengths, RunningAnswer, mean_length

CHAT, SUMMARY = AnswerKind.of(200, 2048), AnswerKind.of(8000, 2048)


def learned(*lengths: tuple[AnswerKind, int, float]) -> AnswerLengths:
    """Eight answers of each kind, of a length, that began at a time."""
    learned = AnswerLengths()
    for kind, num_tokens, began_s in lengths:
        for _ in range(8):
            learned.learn(RunningAnswer(kind, began_s, num_tokens, began_s + 1.0))
    return learned


def test_answers_of_a_kind_are_as_long_as_those_before() -> None:
    lengths = learned((CHAT, 800, 0.0), (SUMMARY, 50, 0.0))
    means = lengths.means([CHAT, SUMMARY], [], 0.0)
    assert means == {CHAT: 800, SUMMARY: 50}


def test_answers_of_a_load_before_count_until_enough_of_the_present_one_have_ended() -> None:
    lengths = learned((CHAT, 800, 0.0))
    assert lengths.means([CHAT], [], 100.0)[CHAT] == 800
    for _ in range(8):
        lengths.learn(RunningAnswer(CHAT, 101.0, 100, 102.0))
    assert lengths.means([CHAT], [], 100.0)[CHAT] == 100


def test_long_answers_that_are_still_decoded_are_not_overlooked() -> None:
    lengths = learned((CHAT, 100, 0.0))
    running = [RunningAnswer(CHAT, 5.0, 400.0, 20.0)] * 24
    assert lengths.means([CHAT], running, 0.0)[CHAT] > 500
    assert lengths.means([CHAT], running, 10.0)[CHAT] == 100  # they are of the load before


def test_no_answer_is_expected_to_be_longer_than_its_limit() -> None:
    lengths = learned((CHAT, 4000, 0.0))
    short = AnswerKind.of(200, 10)
    assert lengths.means([short], [], 0.0)[short] <= 16


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_length_is_found_from_ended_and_running_answers(seed: int) -> None:
    rng = random.Random(seed)
    ended, running = [], []
    for _ in range(2000):  # each has been decoded for a time that anything else decides
        length, age = rng.lognormvariate(6.0, 0.5), rng.uniform(0.0, 2500.0)
        (ended if length <= age else running).append(min(length, age))
    assert mean_length([*ended, *running], len(ended)) == pytest.approx(403.4 * 1.133, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_length_is_found_while_only_the_latest_ends_are_remembered(seed: int) -> None:
    """Four answers begin in a second, and draw 40 tokens in a second: a hundred are decoded at any time."""
    rng, lengths, now_s = random.Random(seed), AnswerLengths(), 300.0
    answers = [(0.25 * number, rng.choice((400.0, 700.0, 1000.0, 1900.0))) for number in range(1200)]
    ends = sorted((began_s + length / 40.0, began_s, length) for began_s, length in answers)
    for end_s, began_s, length in ends:
        if end_s <= now_s:
            lengths.learn(RunningAnswer(CHAT, began_s, length, end_s))
    running = [
        RunningAnswer(CHAT, at_s, 40.0 * (now_s - at_s), now_s) for end_s, at_s, _ in ends if end_s > now_s
    ]
    for since_s in (0.0, 260.0):
        assert lengths.means([CHAT], running, since_s)[CHAT] == pytest.approx(1000.0, rel=0.25)


def test_answers_longer_than_any_of_a_young_load_are_as_long_as_earlier_ones() -> None:
    assert mean_length([100.0] * 4, 2, earlier=[50.0, 300.0]) == pytest.approx(0.5 * 100.0 + 0.5 * 300.0)
    assert mean_length([100.0] * 4, 2, earlier=[50.0]) == pytest.approx(0.5 * 100.0 + 0.5 * 200.0)
