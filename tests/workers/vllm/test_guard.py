"""A command and what it has started end with the process that started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import eventually
from tests.deadline import DEADLINE_S
from workers.vllm.processes import processes


def guarded(command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "workers.vllm.guard", "sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


_MAKES_SHARED_MEMORY = """
import multiprocessing, multiprocessing.shared_memory as memory, os, signal, time
if __name__ == "__main__":
    lock = multiprocessing.get_context("spawn").Lock()
    block = memory.SharedMemory(create=True, size=4096)
    print(os.getpid(), lock._semlock.name.strip("/"), block.name, flush=True)
    signal.pause()
"""


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


@pytest.mark.parametrize("is_killed", [False, True])
def test_shared_memory_goes_with_those_who_made_it(is_killed: bool, tmp_path: Path) -> None:
    script = tmp_path / "makes.py"
    script.write_text(_MAKES_SHARED_MEMORY)
    guard = guarded(f"trap '' TERM; {sys.executable} {script} & wait; wait")
    assert guard.stdin is not None
    assert guard.stdout is not None
    pid, semaphore, block = guard.stdout.readline().decode().split()
    paths = [Path("/dev/shm", f"sem.{semaphore}"), Path("/dev/shm", block)]
    assert all(path.exists() for path in paths)
    os.kill(int(pid), signal.SIGSTOP)
    if is_killed:
        [command] = [process.pid for process in processes() if process.parent == guard.pid]
        os.kill(command, signal.SIGKILL)
    else:
        guard.stdin.close()
    guard.wait(DEADLINE_S)
    assert not any(path.exists() for path in paths)
    guard.stdin.close()
    guard.stdout.close()


def test_what_openmp_registered_of_killed_processes_is_removed() -> None:
    mine = Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}")
    mine.touch()
    guard = guarded(f"p=/dev/shm/__KMP_REGISTERED_LIB_$$_{os.getuid()}; touch $p; echo $p; sleep 1000")
    assert guard.stdin is not None
    assert guard.stdout is not None
    registered = Path(guard.stdout.readline().decode().strip())
    assert registered.exists()
    guard.stdin.close()
    guard.wait(DEADLINE_S)
    assert not registered.exists()
    assert mine.exists(), "this process has not ended"
    mine.unlink()
    guard.stdout.close()
