"""Processes that are forked from a process that has imported the modules they need.

A start of such a process takes little time, because most of a start is imports.

Owns: the fork server, what a forked process inherits. Does not know: what processes do.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from multiprocessing.util import Finalize
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_preloaded = ["__main__"]


def preload(module: str) -> None:
    """Make the fork server import this module at its start.

    To be called before the fork server is started.
    """
    _preloaded.append(module)
    _CONTEXT.set_forkserver_preload(_preloaded)


def start_fork_server() -> None:
    """Start the fork server. Its processes are in the network namespace in which this is called."""
    forkserver.ensure_running()


def _end_all() -> None:
    for process in multiprocessing.active_children():
        process.kill()


# At its end a process waits for those that it has forked: for those that a failed test has left, for ever.
Finalize(None, _end_all, exitpriority=0)


class Descriptor:
    """A descriptor as an argument of a forked process. The process gets the number of a duplicate."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[..., int], tuple[object]]:
        return _number_of, (DupFd(self._fd),)


def _number_of(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


class Forked:
    """A process that calls `function(*arguments)`, and then ends.

    It has `environ` and three descriptors of its own. Methods and properties with names of `subprocess.Popen`
    do the same as there.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: object,
        stdin: int,
        stdout: int,
        stderr: int,
        environ: dict[str, str],
    ) -> None:
        streams = map(Descriptor, (stdin, stdout, stderr))
        self._process = _CONTEXT.Process(target=_call, args=(environ, *streams, function, *arguments))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, and close its descriptors."""
        self.kill()
        self.wait()
        self._process.close()


def _call(
    environ: dict[str, str],
    stdin: int,
    stdout: int,
    stderr: int,
    function: Callable[..., None],
    *arguments: object,
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    try:
        for number, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    except KeyboardInterrupt:  # the traceback would be in the output of another process
        os._exit(1)
    function(*arguments)
