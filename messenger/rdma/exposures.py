"""The exposures of a lane over RDMA: ranges that are open to the peer's queue pair.

Granted pages are open for writes, found blocks for reads. A page that is open for writes must not be given to
another owner, so the page's owner is told when the page is closed. Closing a page during a write breaks the
queue pair for all transfers. So a peer that is told to stop gets some time before its pages are closed.

Owns: the openings of one lane. Does not know: the connection beside the queue pair.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from messenger.rdma.endpoint import Endpoint
from messenger.rdma.memory import RdmaMemory
from messenger.rdma.windows import Access, OpenRanges, close_windows, open_windows
from messenger.transport.exposures import Exposures, Range
from messenger.wire.messages import ExposedPage


@dataclass(slots=True)
class _Opened:
    """The open pages of one transfer."""

    ranges: OpenRanges
    on_closed: Callable[[], None]
    deadline: asyncio.TimerHandle | None = None


class RdmaExposures(Exposures):
    """The open ranges of one connected endpoint."""

    opens_ranges = True

    def __init__(self, endpoint: Endpoint, memory: RdmaMemory) -> None:
        self._endpoint = endpoint
        self._memory = memory
        self._by_transfer: dict[int, _Opened] = {}

    async def expose(
        self, transfer_id: int, pages: Sequence[tuple[int, Range]], on_closed: Callable[[], None]
    ) -> list[ExposedPage]:
        try:
            opened = await open_windows(self._endpoint, self._memory, [place for _, place in pages])
        except BaseException:
            on_closed()
            raise
        self.conceal(transfer_id)
        self._by_transfer[transfer_id] = _Opened(opened, on_closed)
        return [
            ExposedPage(page, self._memory.address + place.offset, key)
            for (page, place), key in zip(pages, opened.remote_keys, strict=True)
        ]

    def conceal(self, transfer_id: int) -> None:
        opened = self._by_transfer.pop(transfer_id, None)
        if opened is not None:
            if opened.deadline is not None:
                opened.deadline.cancel()
            close_windows(self._endpoint, opened.ranges)
            opened.on_closed()

    def conceal_within(self, transfer_id: int, timeout_s: float) -> None:
        opened = self._by_transfer.get(transfer_id)
        if opened is not None and opened.deadline is None:
            loop = asyncio.get_running_loop()
            opened.deadline = loop.call_later(timeout_s, self.conceal, transfer_id)

    async def open_to_read(self, places: Sequence[Range]) -> tuple[list[int], list[int], Callable[[], None]]:
        opened = await open_windows(self._endpoint, self._memory, places, Access.READ)
        addresses = [self._memory.address + place.offset for place in places]
        return addresses, opened.remote_keys, lambda: close_windows(self._endpoint, opened)

    def close(self) -> None:
        """Close the queue pair and all its openings."""
        self._endpoint.close()
        for transfer_id in list(self._by_transfer):
            self.conceal(transfer_id)
