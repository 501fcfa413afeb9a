"""Types of options: what they refuse says what was expected."""

import argparse
from collections.abc import Callable

import pytest

from benchmarks.tools.arguments import counts, lengths, not_negative, one_of
from mooncake.config.policies import EvictionPolicy


def test_lengths_and_choices_are_read() -> None:
    assert lengths("128/64") == (128, 64)
    assert one_of(EvictionPolicy)("length_aware") is EvictionPolicy.LENGTH_AWARE


def test_a_command_without_its_counts_says_how_it_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["index.py", "16", "1000"])
    assert counts("benchmarks.index", "NUM_INSTANCES", "NUM_BLOCKS") == [16, 1000]
    monkeypatch.setattr("sys.argv", ["index.py", "16"])
    with pytest.raises(SystemExit):
        counts("benchmarks.index", "NUM_INSTANCES", "NUM_BLOCKS")
    assert "usage: python -m benchmarks.index [-h] NUM_INSTANCES NUM_BLOCKS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (lengths, "128", "expected tokens in and out, as 128/64, got 128"),
        (lengths, "128/many", "as 128/64"),
        (not_negative, "-1", "expected 0 or a number above 0, got -1"),
        (lengths, "128/0", "expected 1 or more, got 0"),
        (one_of(EvictionPolicy), "fifo", "expected one of lru, lfu, length_aware, got fifo"),
    ],
)
def test_what_is_refused_is_told_with_what_was_expected(
    kind: Callable[[str], object], text: str, message: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        kind(text)
