"""Types of options: what they refuse says what was expected."""

import argparse
from collections.abc import Callable

import pytest

from benchmarks.arguments import lengths, one_of
from mooncake.sections import EvictionPolicy


def test_lengths_and_choices_are_read() -> None:
    assert lengths("128/64") == (128, 64)
    assert one_of(EvictionPolicy)("length_aware") is EvictionPolicy.LENGTH_AWARE


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (lengths, "128", "expected tokens in and out, as 128/64, got 128"),
        (lengths, "128/many", "as 128/64"),
        (lengths, "128/0", "expected 1 or more, got 0"),
        (one_of(EvictionPolicy), "fifo", "expected one of lru, lfu, length_aware, got fifo"),
    ],
)
def test_what_is_refused_is_told_with_what_was_expected(
    kind: Callable[[str], object], text: str, message: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        kind(text)
