"""A command that ends with the process that started it: `python -m workers.vllm.guard COMMAND...`.

The command and its processes are a session of their own. They end when stdin closes, which it does when the
process at its other end is killed.

Owns: the end of these processes. Does not know: their work.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0
"""Time that the command has to end its own processes."""


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # of a terminal: the worker decides
    command = subprocess.Popen(sys.argv[1:], start_new_session=True, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_stdin, args=[command], daemon=True).start()
    status = command.wait()
    _signal(command.pid, signal.SIGKILL)  # what the command has left
    os._exit(status if status >= 0 else 128 - status)


def _end_with_stdin(command: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 4096):
        pass
    _signal(command.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(GRACE_S)
    _signal(command.pid, signal.SIGKILL)


def _signal(session: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signum)


if __name__ == "__main__":
    main()
