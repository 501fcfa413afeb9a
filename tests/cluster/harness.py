"""A harness that starts the real `mooncake-serve` as a user would, and finds each of its processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.deadline import DEADLINE_S
from tests.forked import Forked
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""A client that uses a new connection for each request.

All tests share it, because making a client takes 20 ms to read certificates.
"""
STOP_DEADLINE_S = 5.0
"""The most seconds that `Server.stop` may return."""


class Server:
    """One `mooncake-serve` process with all its children. Use as a context manager."""

    def __init__(
        self, *arguments: str, run_dir: Path, port: int | None = None, until: str = "^ready in"
    ) -> None:
        """Prepare a server.

        On entering the context, it is started, and a line is awaited that matches `until`.
        """
        self._until = until
        self.port = port or free_port()
        self.run_dir = run_dir
        self.lines: list[str] = []
        self._arguments = [*arguments, "--port", str(self.port)]
        self._new_line = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Server":
        """Start the server, without waiting until it is ready."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}
        environ |= {
            "XDG_RUNTIME_DIR": str(self.run_dir),
            "XDG_STATE_HOME": str(self.run_dir / "state"),
            "OMP_NUM_THREADS": "1",
        }
        read_fd, write_fd = os.pipe()
        self.process = self._launch(self._arguments, environ, write_fd)
        os.close(write_fd)
        self._reader = threading.Thread(target=self._read, args=[read_fd], daemon=True)
        self._reader.start()
        return self

    def _launch(
        self, arguments: list[str], environ: dict[str, str], output: int
    ) -> subprocess.Popen[bytes] | Forked:
        command = [sys.executable, "-m", "mooncake", *arguments]
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environ)

    def _read(self, output: int) -> None:
        with open(output) as lines:
            for line in lines:
                with self._new_line:
                    self.lines.append(line.rstrip("\n"))
                    self._new_line.notify_all()
        with self._new_line:
            self._new_line.notify_all()

    def wait_for_line(self, pattern: str, count: int = 1, deadline_s: float = DEADLINE_S) -> str:
        """Wait until `count` lines of output match `pattern`, and return the last of them."""

        with self._new_line:
            self._new_line.wait_for(
                lambda: self.num_lines(pattern) >= count or not self._reader.is_alive(), timeout=deadline_s
            )
            found = self._matches(pattern)
        assert len(found) >= count, f"no {pattern!r} in:\n" + "\n".join(self.lines)
        return found[-1]

    def num_lines(self, pattern: str) -> int:
        """Return the number of lines so far that match `pattern`."""
        return len(self._matches(pattern))

    def _matches(self, pattern: str) -> list[str]:
        return [line for line in self.lines if re.search(pattern, line)]

    def children(self) -> dict[str, int]:
        """Return the ids of running processes by name: `conductor`, `prefill-0`, `prefill-0/messenger`."""
        parent = self.process.pid
        pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        named = ((self._name_of(int(pid)), int(pid)) for pid in pids)
        return {name: pid for name, pid in named if name is not None}

    def pid_of(self, name: str) -> int:
        """Wait until the process `name` runs, and return its id."""
        found: dict[str, int] = {}

        def runs() -> bool:
            found.update(self.children())
            return name in found

        eventually(runs, f"{name} runs")
        return found[name]

    def _name_of(self, pid: int) -> str | None:
        """Return the NAME of a process `python -m MODULE NAME`; None if it has ended or not begun."""
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            return None
        return arguments[3] if len(arguments) > 3 and arguments[2].endswith(".service") else None

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> float:
        """End the server, and return the seconds that it took. The exit code is in `process.returncode`.

        Only seconds count in which this thread had a core: on a busy machine the processes that end get as
        little processor time as this thread.
        """
        started_s, end_s = time.thread_time(), time.monotonic() + DEADLINE_S
        self.process.send_signal(signum)
        while self.process.poll() is None:
            assert time.monotonic() < end_s, "it does not end"
        self._reader.join()
        return time.thread_time() - started_s

    def __enter__(self) -> "Server":
        self.start()
        try:
            self.wait_for_line(self._until)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join()


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` is true, for a state that another process reaches without a message."""
    end_s, pause_s = time.monotonic() + deadline_s, 0.002
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
