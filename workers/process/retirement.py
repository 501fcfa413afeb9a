"""SIGTERM to a worker: it finishes what it runs, then ends.

The Conductor is told (`Retire`), places nothing more here and takes back what waits; when nothing is left it
says `Retired`. What the messenger still has to send leaves before the process does. SIGINT ends it at once.

Owns: when the process may end. Does not know: what it runs, how it stops (`mooncake.node.process`).
"""

import asyncio
import signal

from mooncake.messages.pools import PoolStats


class Retirement:
    """`wanted` is set by SIGTERM, `granted` by the Conductor."""

    def __init__(self) -> None:
        self.wanted, self.granted = asyncio.Event(), asyncio.Event()

    def begin_on_sigterm(self, patience_s: float) -> None:
        """From now on. After `patience_s` nothing is waited for any more."""
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if not self.wanted.is_set():
                self.wanted.set()
                loop.call_later(patience_s, end)

        loop.add_signal_handler(signal.SIGTERM, begin)


def end() -> None:
    """Stop this process, as SIGINT does."""
    signal.raise_signal(signal.SIGINT)


def is_sending(pool: PoolStats) -> bool:
    """Whether KVCache is on its way from or to this pool, at this instance's request."""
    return any(peer.in_flight_bytes for peer in pool.peers.values())
