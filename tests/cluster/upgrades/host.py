"""A program that forks nodes with slowed workers, from the source tree in `PYTHONPATH`.

    python host.py SOCKET

The script belongs to this release. From the other release's tree it uses only the tests' harness.
"""

import os
import sys
from multiprocessing.connection import Listener

from benchmarks.overload.slowed import use_slow_workers
from tests.cluster.forked import supervise
from tests.forked import Forked


def supervise_slowed(arguments: list[str]) -> None:
    use_slow_workers()
    supervise(arguments)


def main() -> None:
    nodes: dict[int, Forked] = {}
    with Listener(sys.argv[1], "AF_UNIX") as listener, listener.accept() as connection:
        while True:
            match connection.recv():
                case ("start", arguments, environ, output):
                    with open(os.devnull) as nothing, open(output, "wb") as stream:
                        node = Forked(
                            supervise_slowed,
                            arguments,
                            stdin=nothing.fileno(),
                            stdout=stream.fileno(),
                            stderr=stream.fileno(),
                            environ=environ,
                        )
                    nodes[node.pid] = node
                    connection.send(node.pid)
                case ("poll", pid):
                    connection.send(nodes[pid].poll())
                case None:
                    return


if __name__ == "__main__":
    main()
