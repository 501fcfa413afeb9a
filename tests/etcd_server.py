"""A real etcd of one member, which tests start, kill and start again with its data."""

import contextlib
import signal
import subprocess
from pathlib import Path

from tests.cluster.harness import eventually
from tests.debian import fetched
from tests.kvstore.forked import entered
from tests.ports import free_port


class EtcdServer:
    """An etcd server with one member. Use as a context manager. Its port stays the same.

    `network` is the network namespace of the server, where `host` is its address; None for the namespace of
    this process.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        scheme: str = "http",
        host: str = "127.0.0.1",
        network: Path | None = None,
    ) -> None:
        self._program = fetched("etcd-server", "usr/bin/etcd")
        self._folder, self._flags, self._network = folder, flags, network
        self._log = folder / "etcd.log"
        self.url = f"{scheme}://{host}:{free_port()}"

    def start(self) -> None:
        """Start the server, with the data that it had before."""
        command = [str(self._program), f"--data-dir={self._folder / 'data'}", *self._flags]
        command += [f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}"]
        command += ["--listen-peer-urls=http://127.0.0.1:0"]
        there = contextlib.nullcontext() if self._network is None else entered(self._network)
        with self._log.open("ab") as log, there:
            start = log.tell()
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(lambda: self._serves(start), "etcd serves")

    def _serves(self, start: int) -> bool:
        """Return whether the log, from position `start` on, says that the server leads.

        The server listens before it leads. If it were killed in between, its data would have no members, and
        it would never serve again.
        """
        log = self._log.read_bytes()[start:]
        assert self._process.poll() is None, log.decode()
        return b"ready to serve client requests" in log

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Kill the server, whose data stay. Another `signum` can stop or continue it instead."""
        self._process.send_signal(signum)
        if signum is signal.SIGKILL:
            self._process.wait()

    def __enter__(self) -> "EtcdServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
