"""The end of a worker without loss of requests, after SIGTERM or an operator's order to the Conductor.

After SIGTERM the worker sends `Retire` to the Conductor, which places no more requests here and moves queued
ones away. When no request is left, the Conductor answers `Retired`. The Conductor also sends `Retired` when
an operator has drained the instance; the message then says that the instance leaves for good. The process
ends when no KVCache of the messenger's pool is in flight. SIGINT ends the process at once.

Owns: when the process may end. Does not know: requests, how a process stops (`mooncake.node.process`).
"""

import asyncio

from mooncake.messages.pools import PoolStats


class Retirement:
    """The state of a retirement. `wanted` is set by SIGTERM or the Conductor, `granted` by the Conductor."""

    def __init__(self) -> None:
        self.wanted, self.granted = asyncio.Event(), asyncio.Event()
        self.is_for_good = False
        """Whether an operator has drained the instance, so that its supervisor must not start it again."""

    def grant(self, *, is_for_good: bool) -> None:
        """Let the process end as soon as no KVCache is in flight.

        The Conductor says so when no request is left on the instance. `is_for_good` says whether an operator
        has drained the instance.
        """
        self.is_for_good = is_for_good
        self.wanted.set()
        self.granted.set()


def is_sending(pool: PoolStats) -> bool:
    """Return whether KVCache that the pool sends or fetches is in flight."""
    return any(peer.in_flight_bytes for peer in pool.peers.values())
