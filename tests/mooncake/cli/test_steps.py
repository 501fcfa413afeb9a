import io
import threading

import pytest
import rich.console

from mooncake.cli import steps
from mooncake.cli.steps import StepDisplay
from tests.deadline import DEADLINE_S

LONG_S = 1000.0


class Seen(io.StringIO):
    """What was written, and an event for each line."""

    def __init__(self) -> None:
        super().__init__()
        self.has_line = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "\n" in text:
            self.has_line.set()
        return written


def console(file: io.StringIO, *, is_terminal: bool = False) -> rich.console.Console:
    return rich.console.Console(file=file, force_terminal=is_terminal, width=100)


def test_without_a_terminal_lines_tell_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PERIOD_S", 0.0)
    seen = Seen()
    with StepDisplay(console(seen)) as shown:
        shown.show("loading")
        shown.show("measuring", 3, 40)
        shown.show("simulating", count="7 simulations")
    told = [line.rpartition(" (")[0] for line in seen.getvalue().splitlines()]
    assert list(dict.fromkeys(told)) == ["loading", "measuring: 3 of 40", "simulating: 7 simulations"]


def test_one_long_step_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PERIOD_S", LONG_S)
    seen = Seen()
    shown = StepDisplay(console(seen))
    shown.show("compiling")
    assert not seen.has_line.is_set()
    monkeypatch.setattr(steps, "PERIOD_S", 0.0)
    with shown:
        assert seen.has_line.wait(DEADLINE_S)
    assert seen.getvalue().startswith("compiling (")


def test_what_takes_no_time_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PERIOD_S", LONG_S)
    seen = Seen()
    with StepDisplay(console(seen)) as shown:
        for number in range(1000):
            shown.show("counting", number)
    assert seen.getvalue() == ""


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    seen = Seen()
    with StepDisplay(console(seen, is_terminal=True)) as shown:
        shown.show("measuring", 3, 40)
    assert "3 of 40" in seen.getvalue()
    assert "\x1b[2K" in seen.getvalue()
