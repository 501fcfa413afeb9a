"""Nodes of the last release, from a checkout of their own, in one cluster with nodes of this tree."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import ROOT, eventually
from tests.compatibility.schema import recorded
from tests.deadline import DEADLINE_S


class LastRelease:
    """A checkout of the last release, and a process of it that forks nodes."""

    def __init__(self, tree: Path, connection: "Connection") -> None:
        self.tree = tree
        self._connection = connection
        self._lock = threading.Lock()

    def ask(self, *question: object) -> int | None:
        """Send a question to the process, and return its answer."""
        with self._lock:
            self._connection.send(question)
            answer: int | None = self._connection.recv()
            return answer


class OldNode:
    """A node's process, with the part of `subprocess.Popen` that `Server` uses."""

    def __init__(
        self, release: LastRelease, arguments: list[str], environ: dict[str, str], output: int
    ) -> None:
        self._release = release
        path = f"/proc/{os.getpid()}/fd/{output}"
        environ = {**environ, "PYTHONPATH": str(release.tree)}
        pid = release.ask("start", arguments, environ, path)
        assert pid is not None
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._release.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = DEADLINE_S) -> int:
        end_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("a node of the last release", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class OldServer(ForkedServer):
    """A `ForkedServer` of the last release."""

    def __init__(
        self, release: LastRelease, *arguments: str, run_dir: Path, until: str = "^ready in"
    ) -> None:
        super().__init__(*arguments, run_dir=run_dir, until=until)
        self._release = release

    def _launch(self, arguments: list[str], environ: dict[str, str], output: int) -> OldNode:  # type: ignore[override]
        return OldNode(self._release, arguments, environ, output)


@contextlib.contextmanager
def checked_out(folder: Path) -> Iterator[LastRelease]:
    """Make a context with a checkout of the last release in `folder`, and its process.

    Skips the test if the repository lacks the commit; in CI the test fails.
    """
    commit, tree = recorded().commit, folder / "tree"
    tree.mkdir()
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], check=False).returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs the commit of the last release, {commit}: clone with its history")
        pytest.skip(f"no commit {commit} here: this is no clone, or one without history")
    archive = subprocess.Popen([*git, "archive", commit], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(tree)], stdin=archive.stdout, check=True)
    assert archive.wait() == 0
    socket = folder / "host"
    command = [sys.executable, str(Path(__file__).parent / "host.py"), str(socket)]
    process = subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)})
    try:
        eventually(socket.exists, "it listens")
        with Client(str(socket), "AF_UNIX") as connection:
            yield LastRelease(tree, connection)
            connection.send(None)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
