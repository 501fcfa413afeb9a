"""Both tables against a dict, through growth, removal and sweeping."""

import itertools
import random
from array import array
from collections.abc import Callable

import pytest

from conductor.index import block_table
from conductor.index.block_table import ABSENT, BlockTable, DictTable, NativeTable, new_block_table
from mooncake.native import NoCompilerError

BOTH = pytest.mark.parametrize("new_table", [NativeTable, DictTable])
NewTable = Callable[[], BlockTable]
MARKED = array("B", [number % 2 for number in range(10)])


def sweep_all(table: BlockTable) -> list[int]:
    removed: list[int] = []
    for _ in range(600):  # twice all that these tests have
        removed += table.sweep(MARKED)
    return removed


def runs_of(numbers: list[int]) -> list[list[int]]:
    known = itertools.takewhile(bool, numbers)
    runs = [(number, len(list(same))) for number, same in itertools.groupby(known)]
    return [[number for number, _ in runs], list(itertools.accumulate(length for _, length in runs))]


@BOTH
@pytest.mark.parametrize("num_bytes", [1, 2])
def test_does_as_a_dict_does(new_table: NewTable, num_bytes: int) -> None:
    """Few different keys, so that most are there and are dropped again; in one byte most have one home."""
    draw, table, model = random.Random(num_bytes), new_table(), dict[bytes, int]()
    for _ in range(1000):
        keys = list({bytes(16 - num_bytes) + draw.randbytes(num_bytes) for _ in range(draw.randrange(40))})
        numbers = [draw.choice((ABSENT, draw.randrange(10))) for _ in keys]
        assert list(table.find(keys)) == [model.get(key, ABSENT) for key in keys]
        asked = [*model, *keys]
        assert [list(found) for found in table.runs(asked)] == runs_of([model.get(key, 0) for key in asked])
        table.set(keys, numbers)
        model |= zip(keys, numbers, strict=True)
        model = {key: number for key, number in model.items() if number != ABSENT}
        assert len(table) == len(model)
        if draw.random() < 0.01:
            removed = sweep_all(table)
            assert sorted(removed) == sorted(number for number in model.values() if number % 2)
            model = {key: number for key, number in model.items() if number % 2 == 0}
    assert list(table.find(list(model))) == list(model.values())


@BOTH
def test_many_keys_and_a_sweep_that_drops_half_of_them(new_table: NewTable) -> None:
    draw, table = random.Random(7), new_table()
    keys = [draw.randbytes(16) for _ in range(100_000)]
    for start in range(0, len(keys), 1000):
        table.set(keys[start : start + 1000], [1 + index % 9 for index in range(1000)])
    odd = [1 + index % 9 for index in range(1000)] * 100
    assert list(table.find(keys)) == odd
    removed = sweep_all(table)
    assert len(removed) == sum(number % 2 for number in odd)
    assert len(table) == len(keys) - len(removed)
    assert list(table.find(keys)) == [0 if number % 2 else number for number in odd]


@BOTH
def test_no_keys_and_keys_of_another_length(new_table: NewTable) -> None:
    table = new_table()
    assert list(table.find([])) == []
    assert [list(found) for found in table.runs([])] == [[], []]
    table.set([], [])
    with pytest.raises(ValueError, match="16 bytes"):
        table.set([bytes(15)], [1])
    assert len(table) == 0


def test_without_a_compiler_a_dict_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(new_block_table(), NativeTable)

    def no_compiler() -> None:
        raise NoCompilerError("no C++ compiler")

    monkeypatch.setattr(block_table, "_native", no_compiler)
    assert isinstance(new_block_table(), DictTable)
    assert "no C++ compiler" in caplog.text
