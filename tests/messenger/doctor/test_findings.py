"""Checks that fail or hang."""

import threading
from collections.abc import Iterator

import pytest

from messenger.doctor.findings import Check, Finding, Level, as_size
from messenger.doctor.machine import Machine
from tests.deadline import DEADLINE_S
from tests.messenger.doctor.machines import GIB


def test_an_error_of_a_check_is_one_of_its_findings() -> None:
    def look() -> Iterator[Finding]:
        yield Finding(Level.OK, "odd", "first")
        raise ZeroDivisionError("by zero")

    first, second = Check("odd", look).run()
    assert first.level is Level.OK
    assert (second.level, second.title) == (Level.WARN, "odd")
    assert "ZeroDivisionError: by zero" in second.found


def test_a_check_that_hangs_is_given_up_and_keeps_what_it_found() -> None:
    release = threading.Event()

    def look() -> Iterator[Finding]:
        yield Finding(Level.OK, "slow", "first")
        release.wait(DEADLINE_S)

    try:
        first, second = Check("slow", look, deadline_s=0.05).run()
    finally:
        release.set()
    assert first.found == "first"
    assert (second.level, second.found) == (Level.WARN, "no result within 0.05 s, given up")


def test_a_command_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messenger.doctor.machine.COMMAND_TIMEOUT_S", 0.05)
    assert Machine().run("sleep", "60") is None
    assert Machine().run("no-such-command") is None
    assert Machine().run("false") is None


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (2048, "2 KiB"), (3 * GIB // 2, "1.5 GiB"), (1 << 40, "1 TiB")]
)
def test_sizes_are_for_people(num_bytes: int, text: str) -> None:
    assert as_size(num_bytes) == text
