"""Calls in processes: results in order, and one that fails spoils no other."""

import os
from functools import partial
from pathlib import Path

import pytest

from benchmarks.gpu.processes import results_of
from benchmarks.report import Found, Report


def square(number: int) -> int:
    return number * number


def die() -> int:
    os._exit(3)


def fail() -> int:
    raise RuntimeError("misaligned\naddress")


def fail_in_a_used_process(file: Path) -> int:
    """The device's state after another call's fault: only a new process finds it well."""
    if not file.exists():
        file.touch()
        raise RuntimeError("an illegal memory access was encountered")
    return 7


def test_results_come_in_order_and_a_dead_process_takes_no_other_along() -> None:
    calls = [partial(square, 2), partial(die), partial(square, 3), partial(int, "x"), partial(square, 4)]
    first, dead, second, wrong, third = results_of(calls, 2)
    assert (first, second, third) == (4, 9, 16)
    assert "terminated abruptly" in str(dead)
    assert isinstance(wrong, ValueError)


def test_a_check_says_where_another_process_has_raised_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    [error] = results_of([fail], 1)

    def find() -> Found:
        raise error

    report = Report()
    report.checks("Sums")
    assert not report.check("a sum", find)
    assert not report.is_good
    line = fail.__code__.co_firstlineno + 1
    said = f'| a sum | RuntimeError: misaligned address File "{__file__}", line {line}, in fail |'
    assert said in capsys.readouterr().out


def test_a_call_that_fails_is_made_again_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert list(results_of([partial(fail_in_a_used_process, tmp_path / "failed")], 2)) == [7]
