"""Starts the real `mooncake-serve` as a user would and gives its tests a grip on every process."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 5.0


class Server:
    """One `mooncake-serve` process with all its children. Use as a context manager."""

    def __init__(
        self, *arguments: str, run_dir: Path, port: int | None = None, until: str = "^ready in"
    ) -> None:
        """`with` waits until a line matches `until`."""
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
        """Start without waiting until it is ready."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mooncake", *self._arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environ, "XDG_RUNTIME_DIR": str(self.run_dir), "OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._new_line:
                self.lines.append(line.rstrip("\n"))
                self._new_line.notify_all()
        with self._new_line:
            self._new_line.notify_all()

    def wait_for_line(self, pattern: str, count: int = 1, deadline_s: float = START_DEADLINE_S) -> str:
        """Wait until `count` lines match; the last of them."""

        def matches() -> list[str]:
            return [line for line in self.lines if re.search(pattern, line)]

        with self._new_line:
            self._new_line.wait_for(
                lambda: len(matches()) >= count or not self._reader.is_alive(), timeout=deadline_s
            )
            found = matches()
        assert len(found) >= count, f"no {pattern!r} in:\n" + "\n".join(self.lines)
        return found[-1]

    def pids_of(self, module: str) -> list[int]:
        """Process ids of the children that run `module`, oldest first."""
        parent = self.process.pid
        children = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        return sorted((pid for pid in children if _module_of(pid) == module), key=_age_rank)

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> float:
        """End it; seconds that it took. The exit code is in `process.returncode`."""
        started_s = time.monotonic()
        self.process.send_signal(signum)
        self.process.wait(STOP_DEADLINE_S + 5)
        self._reader.join()
        return time.monotonic() - started_s

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
                self.process.wait(STOP_DEADLINE_S + 5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join()


def _module_of(pid: int) -> str:
    """The module of a `python -m module` process; empty for one that is ending or has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return arguments[2].decode() if len(arguments) > 2 else ""


def _age_rank(pid: int) -> tuple[int, int]:
    """Lower for those that were started earlier. Process ids alone begin anew every now and then."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, pid
    return int(stat.rpartition(")")[2].split()[19]), pid  # clock ticks since boot


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    """Poll for a state that another process reaches and does not announce."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.02)
