"""The end of a node that has open answers."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mooncake.node import supervisor
from mooncake.node.child import Child
from mooncake.node.supervisor import Stopping, Supervisor
from tests.deadline import DEADLINE_S
from tests.mooncake.node.test_supervisor import child, lives


def end_during_drain(
    children: list[Child],
    capture: pytest.CaptureFixture[str],
    steps: Sequence[tuple[str, Callable[[], None]]] = (),
    drain_s: float = DEADLINE_S,
    num_signals: int = 1,
) -> tuple[int, str]:
    """Run until all serve, then send SIGTERM to the supervisor; its exit code and output.

    Then each of the `steps` is done when the output has its text. `num_signals` are sent at the same time.
    """
    output = ""

    async def follow(steps: Sequence[tuple[str, Callable[[], None]]]) -> None:
        nonlocal output
        for text, step in steps:
            while text not in output:
                captured = capture.readouterr()
                output += captured.out + captured.err
                await asyncio.sleep(0.01)
            step()

    def end() -> None:
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGTERM)

    async def run() -> int:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            first = ("ready in", end)
            group.create_task(follow([first, *steps]))
            return await Supervisor(children, Stopping(), drain_s).run()

    code = asyncio.run(run())
    captured = capture.readouterr()
    return code, output + captured.out + captured.err


WAITS = "[front] waiting for 2 open answers, at most 180 s; press Ctrl-C again to end now"


def test_open_answers_are_finished_while_all_else_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that the answers need is restarted even after the signal."""
    children = [child("front", "drain", tmp_path, drains=True), child("d0", "serve", tmp_path)]
    steps = [
        (WAITS, lambda: os.kill(lives(tmp_path, "d0")[0], signal.SIGKILL)),
        ("[d0] ready served 2", lambda: os.kill(lives(tmp_path, "front")[0], signal.SIGUSR1)),
    ]
    code, output = end_during_drain(children, capsys, steps)
    assert code == 0
    assert "[d0] died (signal 9); starting it again" in output
    assert "[front] died" not in output
    assert (len(lives(tmp_path, "front")), len(lives(tmp_path, "d0"))) == (1, 2)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_drain(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
) -> None:
    monkeypatch.setattr(supervisor, "TOGETHER_S", 0.0)
    children = [child("front", "drain", tmp_path, drains=True), child("d0", "serve", tmp_path)]
    code, output = end_during_drain(children, capsys, [(WAITS, lambda: os.kill(os.getpid(), signum))])
    assert code == 0
    assert "died" not in output


def test_signals_at_the_same_time_are_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command `timeout` sends two. The second one may come when the drain has begun."""
    monkeypatch.setattr(supervisor, "TOGETHER_S", DEADLINE_S)
    children = [child("front", "drain", tmp_path, drains=True), child("d0", "serve", tmp_path)]
    steps = [
        (WAITS, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        (WAITS, lambda: os.kill(lives(tmp_path, "d0")[0], signal.SIGKILL)),
        ("[d0] ready served 2", lambda: os.kill(lives(tmp_path, "front")[0], signal.SIGUSR1)),
    ]
    code, output = end_during_drain(children, capsys, steps, num_signals=2)
    assert code == 0
    assert "[d0] died (signal 9); starting it again" in output, "the drain goes on after the second signal"


def test_the_drain_ends_after_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    children = [child("front", "drain", tmp_path, drains=True), child("d0", "serve", tmp_path)]
    code, output = end_during_drain(children, capsys, drain_s=0.05)
    assert code == 0
    assert "died" not in output


def test_a_process_that_dies_during_its_drain_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    children = [child("front", "drain", tmp_path, drains=True), child("d0", "serve", tmp_path)]
    steps = [(WAITS, lambda: os.kill(lives(tmp_path, "front")[0], signal.SIGKILL))]
    code, _ = end_during_drain(children, capsys, steps)
    assert code == 0
    assert len(lives(tmp_path, "front")) == 1


def test_a_fatal_error_ends_the_drain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    children = [
        child("front", "drain", tmp_path, drains=True),
        child("d0", "fatal-when-restarted", tmp_path),
    ]
    steps = [(WAITS, lambda: os.kill(lives(tmp_path, "d0")[0], signal.SIGKILL))]
    code, output = end_during_drain(children, capsys, steps)
    assert code == 1
    assert output.splitlines()[-1] == "error: the model is not there"
