"""The peer of the pool's benchmark: Mooncake Store in a virtual environment of its own.

Its clients are sides of the comparison.

Owns: installing, settings, processes of master and clients. Does not know: the comparison.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kvstore.rounds import progress
from benchmarks.kvstore.workload import WORKING_SET_BYTES, Op
from benchmarks.servers import heeding_sigterm

PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake-serve"
SEGMENT_BYTES = 4 * WORKING_SET_BYTES
"""The bytes of the peer's segment. In a segment of this size it never evicts."""
_START_DEADLINE_S = 60.0
_DRIVER = Path(__file__).with_name("mooncake_store_driver.py")
# The fastest settings that were measured here: no statistics, no log line for each batch; plain copies within
# one process, where they are allowed; one connection pool and large slices over TCP.
_ENVIRONMENT = {
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_SLICE_SIZE": str(16 << 20),
}
CHECKSUMS = {"MOONCAKE_STORE_CHECKSUM": "1"}
SAME_PROCESS = {"MC_STORE_MEMCPY": "1"}
SECOND_PROCESS = {"MC_STORE_MEMCPY": "0"}


class PeerError(Exception):
    """The error of a peer that could not be installed or started, or has ended."""


def install() -> Path:
    """Return the Python of the peer's virtual environment, which is made on first use. Raises PeerError."""
    home = CACHE / "peer"
    python, marker = home / "bin" / "python", home / "installed"
    requirements = [PACKAGE, f"numpy=={np.__version__}"]
    if not marker.exists() or marker.read_text().split() != requirements:
        progress(f"installing {PACKAGE} into {home}")
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(home)],
            [str(python), "-m", "pip", "install", "--quiet", *requirements],
            [str(python), "-I", "-c", "import mooncake.store"],
        ):
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise PeerError(f"{PACKAGE} cannot be installed: {reason}")
        marker.write_text("\n".join(requirements))
    return python


class Master:
    """The peer's master process on free ports of loopback."""

    def __init__(self, python: Path) -> None:
        rpc_port, metrics_port = _free_ports(2)
        self.python = python
        self.address = f"127.0.0.1:{rpc_port}"
        command = [
            str(python.with_name("mooncake_master")),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={rpc_port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics_port}",
            "--enable_metric_reporting=false",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _await_listener(rpc_port, self.process)
        except PeerError:
            self.close()
            raise

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Driver:
    """A driver of the peer, in a process of its own.

    The driver is a `Side`: its methods `time` and `open` run the workload in that process.
    """

    def __init__(self, command: Sequence[str], settings: Mapping[str, str]) -> None:
        self._log_fd = os.memfd_create("peer-log")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_fd,
            env={**os.environ, **_ENVIRONMENT, **settings},
            text=True,
        )
        try:
            self.greeting = self._answer()
        except PeerError:
            self.close()
            raise

    def open(self, block_bytes: int) -> None:
        self.call("open", block_bytes)

    def time(self, op: Op, depth: int, budget_s: float) -> list[float]:
        times_s: list[float] = self.call("time", op, depth, budget_s)
        return times_s

    def call(self, *command: object) -> Any:
        """Return the driver's answer to a command. Raises PeerError if the driver ends without an answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = os.pread(self._log_fd, 1 << 20, 0).decode().strip().splitlines() or ["without a word"]
            raise PeerError(f"the driver of {PACKAGE} ended: {log[-1]}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        os.close(self._log_fd)


@contextlib.contextmanager
def same_process(python: Path, settings: Mapping[str, str]) -> Iterator[tuple[Master, Driver]]:
    """Make a context with a client that also mounts the segment, so that copies stay in memory."""
    with heeding_sigterm(), contextlib.closing(Master(python)) as master:
        driver = _driver(master, SEGMENT_BYTES, {**SAME_PROCESS, **settings})
        with contextlib.closing(driver):
            yield master, driver


@contextlib.contextmanager
def second_process(python: Path, settings: Mapping[str, str]) -> Iterator[Driver]:
    """Make a context with two processes: one mounts the segment, the other puts and gets over TCP."""
    settings = {**SECOND_PROCESS, **settings}
    with (
        heeding_sigterm(),
        contextlib.closing(Master(python)) as master,
        contextlib.closing(_driver(master, SEGMENT_BYTES, settings)),
        contextlib.closing(_driver(master, 0, settings)) as client,
    ):
        yield client


def _driver(master: Master, segment_bytes: int, settings: Mapping[str, str]) -> Driver:
    return Driver([str(master.python), str(_DRIVER), master.address, str(segment_bytes)], settings)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _await_listener(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise PeerError("mooncake_master did not start")
