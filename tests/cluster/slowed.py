"""`mooncake-serve` with workers that are slowed down (`benchmarks.overload.slowed`).

Their passes take as long as those of a larger model. So instances are in a pass all the time, and leave the
cores of the machine to other processes.
"""

from collections.abc import Callable

from benchmarks.overload.slowed import use_slow_workers
from tests.cluster.forked import ForkedServer, supervise


class SlowedServer(ForkedServer):
    """A `ForkedServer` with slowed workers."""

    @property
    def _supervise(self) -> Callable[[list[str]], None]:
        return _supervise_slowed


def _supervise_slowed(arguments: list[str]) -> None:
    use_slow_workers()
    supervise(arguments)
