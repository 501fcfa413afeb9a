"""The two servers that the front's benchmark loads: our front and a bare application.

Our front has a Conductor, and instances that compute nothing.

Owns: their processes, the measurement of processor time. Does not know: how they are loaded.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import free_port, heeding_sigterm, serving
from mooncake.security.keys import ClusterKey


class Server(NamedTuple):
    """A server that is ready. If it has further `fronts`, they take its requests.

    `pid` is the process whose processor time counts.
    """

    url: str
    pid: int
    fronts: tuple["Server", ...] = ()

    @property
    def pids(self) -> list[int]:
        return [self.pid, *(front.pid for front in self.fronts)]


@contextlib.contextmanager
def front(num_each: int = 1, num_fronts: int = 0) -> Iterator[Server]:
    """Make a context with a Conductor, prefill and decode instances, and further fronts.

    `num_each`: the number of instances of each role. `num_fronts`: the number of fronts in processes of their
    own. Raises ServerError.
    """
    with heeding_sigterm(), tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "cluster.key"
        ClusterKey.generate().save(key)
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        cluster = ["--security-key-file", str(key), "--conductor-endpoint", endpoints[0]]
        conductor = ["conductor", *cluster, "--conductor-reply-endpoint", endpoints[1]]
        conductor += ["--conductor-max-running-requests", "10000"]
        other = ["front", *cluster, "--conductor-reply-endpoint", "tcp://127.0.0.1:*"]
        instant = [sys.executable, "-m", "benchmarks.front.instant_workers", *cluster]
        instant += ["--prefill", str(num_each), "--decode", str(num_each)]
        workers = subprocess.Popen(instant)
        try:
            with contextlib.ExitStack() as nodes:
                ours = nodes.enter_context(_node(conductor))
                others = [nodes.enter_context(_node(other)) for _ in range(num_fronts)]
                yield ours._replace(fronts=tuple(others))
        finally:
            workers.terminate()
            workers.wait()


@contextlib.contextmanager
def _node(arguments: Sequence[str]) -> Iterator[Server]:
    """Start a node with these arguments. The context gets its server."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mooncake", "--port", str(port), "--role", *arguments]
    with serving(command, f"{url}/ready") as supervisor:
        # The supervisor has no other child.
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
        yield Server(url, int(children.read_text()))


@contextlib.contextmanager
def bare() -> Iterator[Server]:
    """Make a context with the bare application. Raises ServerError."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.front.bare_front", str(port)]
    with serving(command, f"{url}/v1/models") as process:
        yield Server(url, process.pid)


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time that all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
