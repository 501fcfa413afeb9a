"""Forks nodes with slowed workers, of the tree in which it runs: `python host.py SOCKET`, with the tree as
`PYTHONPATH`.

It is a script of this release that uses nothing but the tests' harness of the other one.
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
