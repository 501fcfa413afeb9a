"""`mooncake-serve` with workers whose passes take as long as a larger model's (`benchmarks.overload.slowed`).

So instances are in a pass all the time, and leave the cores of the machine to others.
"""

from collections.abc import Callable

from benchmarks.overload.slowed import use_slow_workers
from tests.cluster.forked import ForkedServer, supervise


class SlowedServer(ForkedServer):
    """As `ForkedServer`, with slowed workers."""

    @property
    def _supervise(self) -> Callable[[list[str]], None]:
        return _supervise_slowed


def _supervise_slowed(arguments: list[str]) -> None:
    use_slow_workers()
    supervise(arguments)
