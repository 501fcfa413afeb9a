"""A server as a child process for the time of a measurement.

Owns: a free port, starting, waiting until the server is ready, ending. Does not know: which server, the
measurement.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import httpx

START_DEADLINE_S = 900.0  # drawing a large model's random weights takes minutes, as does compiling a model
END_DEADLINE_S = 60.0


class ServerError(Exception):
    """The error of a server that did not start."""


@contextlib.contextmanager
def telling_why(*errors: type[Exception]) -> Iterator[int]:
    """Make a context with a file for servers' output, and yield its descriptor.

    One of `errors` ends the program with the last lines of the file.
    """
    with tempfile.TemporaryFile() as log:
        try:
            yield log.fileno()
        except errors as error:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            sys.exit("\n".join([*lines[-20:], str(error)]))


class Server:
    """A server that is ready, with all processes of its session."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The id of the process that was started."""
        return self._process.pid

    def pause(self) -> None:
        """Pause all processes of the server until `resume` is called."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Make a context in which SIGTERM ends the program like Ctrl-C, so that its servers are ended too."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    ready_url: str,
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
) -> Iterator[Server]:
    """Start a server with `command`, and wait until `ready_url` answers 200.

    The server is ended with the context, even after SIGTERM. `output`: a descriptor for the server's stdout
    and stderr; None for our own. Raises ServerError.
    """
    with heeding_sigterm():
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            deadline_s = time.monotonic() + START_DEADLINE_S
            while not _is_ready(ready_url):
                if process.poll() is not None:
                    raise ServerError(f"{command[0]} ended with {process.returncode} instead of starting")
                if time.monotonic() > deadline_s:
                    raise ServerError(f"{command[0]} was not ready after {START_DEADLINE_S:.0f} s")
                time.sleep(0.2)
            yield Server(process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
