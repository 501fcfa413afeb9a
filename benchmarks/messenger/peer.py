"""The peer of the messenger's benchmark: Mooncake's Transfer Engine over TCP.

It runs in the environment of `benchmarks/kvstore/mooncake_store.py`.

Owns: its two processes. Does not know: the comparison.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kvstore.mooncake_store import Driver
from benchmarks.kvstore.workload import Op

_DRIVER = Path(__file__).with_name("peer_driver.py")


class TransferDriver(Driver):
    """The end that transfers. `Transfers` run in its process."""

    def time_concurrent(self, op: Op, num_transfers: int, budget_s: float) -> list[float]:
        times_s: list[float] = self.call("time_concurrent", op, num_transfers, budget_s)
        return times_s

    def time_latency(self, op: Op, num_bulk: int, budget_s: float) -> tuple[list[float], float]:
        times_s, bulk_bytes_per_s = self.call("time_latency", op, num_bulk, budget_s)
        return times_s, bulk_bytes_per_s


@contextlib.contextmanager
def transfer_engine(python: Path) -> Iterator[TransferDriver]:
    """Make a context with the peer's two processes on loopback. Raises PeerError."""
    with contextlib.closing(Driver([str(python), str(_DRIVER)], {})) as target:
        session, address = target.greeting
        command = [str(python), str(_DRIVER), session, str(address)]
        with contextlib.closing(TransferDriver(command, {})) as driver:
            yield driver
