"""`mooncake-serve` with all its processes forked (`tests.forked`), so that they start in less time.

Owns: how the supervisor forks its children. Does not know: what the processes do.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.harness import ROOT, Server
from tests.forked import Forked, preload

_CONTEXT = multiprocessing.get_context("fork")
_CLONE_NEWNS = 0x00020000
_NAME = "child-of-mooncake-serve:"
preload("tests.cluster.preloaded")


def launch(
    supervisor: Callable[[list[str]], None], arguments: list[str], environ: dict[str, str], output: int
) -> Forked:
    """Start a process that runs `supervisor` and writes its output to the descriptor `output`."""
    with open(os.devnull) as nothing:
        return Forked(
            supervisor, arguments, stdin=nothing.fileno(), stdout=output, stderr=output, environ=environ
        )


class ForkedServer(Server):
    """A `Server` that starts faster.

    Forked processes all have the same command line, so each has an open file with its name.
    """

    def _launch(self, arguments: list[str], environ: dict[str, str], output: int) -> Forked:
        return launch(self._supervise, arguments, environ, output)

    @property
    def _supervise(self) -> Callable[[list[str]], None]:
        """The function that the supervisor's process runs."""
        return supervise

    def _name_of(self, pid: int) -> str | None:
        folder = f"/proc/{pid}/fd"
        for number in _listed(folder):
            with contextlib.suppress(OSError):  # it has been closed, or the process has ended
                _, is_name, name = os.readlink(f"{folder}/{number}").partition(_NAME)
                if is_name:
                    return name.removesuffix(" (deleted)")
        return None


class ServerOnOtherHost(ForkedServer):
    """A `ForkedServer` with a mount namespace of its own, so that other servers take it for one on another
    host."""

    @property
    def _supervise(self) -> Callable[[list[str]], None]:
        return supervise_elsewhere


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def supervise(arguments: list[str], folder: Path = ROOT) -> None:
    """Run the supervisor of a node in this process, in the working directory `folder`."""
    os.chdir(folder)
    sys.argv = ["mooncake-serve", *arguments]
    asyncio.create_subprocess_exec = _Child.start  # type: ignore[assignment]
    runpy.run_module("mooncake", run_name="__main__")


def supervise_elsewhere(arguments: list[str]) -> None:
    """Run the supervisor of a node in this process, in a mount namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace of its own")
    supervise(arguments)


class _Child:
    """One child of a supervisor, with the part of `asyncio.subprocess.Process` that the supervisor uses."""

    def __init__(self, process: multiprocessing.Process, stdin: int) -> None:
        self._process = process
        self._ended = asyncio.Event()
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.returncode: int | None = None
        assert process.pid is not None
        self.pid = process.pid
        end = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(end, self._end, end)

    @classmethod
    async def start(
        cls,
        _python: str,
        _m: str,
        module: str,
        name: str,
        *,
        stdout: int,
        pass_fds: Sequence[int],
        env: dict[str, str],
        **_: object,
    ) -> "_Child":
        child_stdin, stdin = os.pipe()
        process = _CONTEXT.Process(target=_run, args=(module, name, env, child_stdin, stdout, pass_fds))
        process.start()
        os.close(child_stdin)
        return cls(process, stdin)

    def _end(self, end: int) -> None:
        asyncio.get_running_loop().remove_reader(end)
        os.close(end)
        self._process.join()
        self.returncode = self._process.exitcode
        self.stdin.close()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


def _run(
    module: str, name: str, environ: dict[str, str], stdin: int, stdout: int, pass_fds: Sequence[int]
) -> None:
    """Run a module as `python -m MODULE NAME` does, in a session of its own.

    Of the supervisor's descriptors, the process keeps only `pass_fds`.
    """
    signal.set_wakeup_fd(-1)
    for signum, handler in (
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGCHLD, signal.SIG_DFL),
    ):
        signal.signal(signum, handler)
    os.setsid()
    for number, fd in enumerate((stdin, stdout, stdout)):
        os.dup2(fd, number)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in pass_fds:
            os.closerange(fd, fd + 1)
    os.memfd_create(_NAME + name)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv, sys.stdin = [module, name], os.fdopen(0)
    sys.modules.pop(module, None)  # it runs as __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)
