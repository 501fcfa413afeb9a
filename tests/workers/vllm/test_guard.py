"""A command and what it has started end with the process that started it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import eventually
from tests.deadline import DEADLINE_S


def guarded(command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "workers.vllm.guard", "sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it without anybody who has taken note."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.parametrize(
    "command", ["sleep 1000 & echo $!; wait", "trap '' TERM; sleep 1000 & echo $!; wait"]
)
def test_everything_ends_when_stdin_closes(command: str) -> None:
    guard = guarded(command)
    assert guard.stdin is not None
    assert guard.stdout is not None
    pid = int(guard.stdout.readline())
    guard.stdin.close()
    guard.wait(DEADLINE_S)
    eventually(lambda: is_gone(pid), "what the command has started has ended")
    guard.stdout.close()


def test_a_command_that_ends_takes_along_what_it_has_started() -> None:
    guard = guarded("sleep 1000 & echo $!; exit 7")
    assert guard.stdin is not None
    assert guard.stdout is not None
    pid = int(guard.stdout.readline())
    assert guard.wait(DEADLINE_S) == 7
    eventually(lambda: is_gone(pid), "what the command has started has ended")
    guard.stdin.close()
    guard.stdout.close()
