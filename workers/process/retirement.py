"""A worker's reaction to SIGTERM: it finishes its requests, then ends.

The Conductor is told (`Retire`), places nothing more here and takes back waiting requests; when none is left
it answers `Retired`. The process waits until the messenger has sent its KVCache. SIGINT ends it at once.

Owns: when the process may end. Does not know: its requests, how it stops (`mooncake.node.process`).
"""

import asyncio
import signal

from mooncake.messages.pools import PoolStats


class Retirement:
    """The state of a retirement: `wanted` is set by SIGTERM, `granted` by the Conductor."""

    def __init__(self) -> None:
        self.wanted, self.granted = asyncio.Event(), asyncio.Event()

    def begin_on_sigterm(self, timeout_s: float) -> None:
        """Retire on SIGTERM. After `timeout_s` the process ends whatever it runs."""
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if not self.wanted.is_set():
                self.wanted.set()
                loop.call_later(timeout_s, end)

        loop.add_signal_handler(signal.SIGTERM, begin)


def end() -> None:
    """Stop this process as SIGINT does."""
    signal.raise_signal(signal.SIGINT)


def is_sending(pool: PoolStats) -> bool:
    """Return whether KVCache that this instance sends or fetches is in flight."""
    return any(peer.in_flight_bytes for peer in pool.peers.values())
