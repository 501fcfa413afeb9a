"""A command that ends with the process that started it: `python -m workers.vllm.guard COMMAND...`.

The command and its processes are a Unix session of their own. This process ends all of them when its stdin
closes, which also happens when the process at the other end of the pipe is killed. In any case their shared
memory and semaphores of Python's `multiprocessing` are removed, and so are the entries of Intel's OpenMP in
shared memory.

Owns: the end of these processes. Does not know: their work.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from workers.vllm.processes import members

GRACE_S = 2.0
"""Seconds that the command has to end its own processes, before they are killed.

A worker has longer to end (`mooncake.node.process.STOP_DEADLINE_S`). A vLLM that is starting does not end by
itself while it compiles.
"""
TRACKER_S = 5.0
"""Seconds that resource trackers have to clean up after killed processes."""
_POLL_S = 0.02
_OPENMP = "__KMP_REGISTERED_LIB_"
"""The beginning of the names under which Intel's OpenMP registers processes.

Process id and user id follow.
"""


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        # A terminal signals the guard too, but the worker decides. The command would inherit SIG_IGN.
        signal.signal(signum, lambda *_: None)
    command = subprocess.Popen(sys.argv[1:], start_new_session=True, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_stdin, args=[command], daemon=True).start()
    status = command.wait()
    _kill(command.pid)  # processes that the command has left behind
    _unregister_ended(Path("/dev/shm"))
    os._exit(status if status >= 0 else 128 - status)


def _end_with_stdin(command: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 4096):
        pass
    _signal(command.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(GRACE_S)
    _kill(command.pid)
    _unregister_ended(Path("/dev/shm"))


def _unregister_ended(folder: Path) -> None:
    """Remove from `folder` OpenMP's registrations of this user's ended processes.

    Killed processes leave such registrations behind.
    """
    for path in folder.glob(f"{_OPENMP}*_{os.getuid()}"):
        pid = path.name.removeprefix(_OPENMP).partition("_")[0]
        if not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def _kill(group: int) -> None:
    """Kill a process group, its resource trackers last.

    The trackers first unlink what the other processes have left in /dev/shm.
    """
    deadline_s = time.monotonic() + TRACKER_S
    while (left := members(group)) and time.monotonic() < deadline_s:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT if process.is_tracker else signal.SIGKILL)
        time.sleep(_POLL_S)
    _signal(group, signal.SIGKILL)


def _signal(group: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


if __name__ == "__main__":
    main()
