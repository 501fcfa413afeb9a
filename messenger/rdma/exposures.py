"""What one lane opens of this side's segment to the queue pair of its peer: granted pages to be written,
found blocks to be read.

A page that is open to be written must not be given to anybody else: its owner is told when it is closed.

Owns: the openings of one lane. Does not know: the connection beside the queue pair.
"""

from collections.abc import Callable, Sequence

from messenger.protocol import ExposedPage
from messenger.rdma.endpoint import Endpoint
from messenger.rdma.memory import RdmaMemory
from messenger.rdma.windows import Access, Grant, Range, grant, revoke


class Exposures:
    """Of one connected endpoint."""

    def __init__(self, endpoint: Endpoint, memory: RdmaMemory) -> None:
        self._endpoint = endpoint
        self._memory = memory
        self._by_transfer: dict[int, tuple[Grant, Callable[[], None]]] = {}

    async def expose(
        self, transfer_id: int, pages: Sequence[tuple[int, Range]], on_closed: Callable[[], None]
    ) -> list[ExposedPage]:
        """Opens pages to be written. `on_closed` is called once, when nobody can write to them any more.

        Raises RdmaError.
        """
        try:
            opened = await grant(self._endpoint, self._memory, [place for _, place in pages])
        except BaseException:
            on_closed()
            raise
        self.conceal(transfer_id)
        self._by_transfer[transfer_id] = opened, on_closed
        return [
            ExposedPage(page, self._memory.address + place.offset, key)
            for (page, place), key in zip(pages, opened.remote_keys, strict=True)
        ]

    def conceal(self, transfer_id: int) -> None:
        """At once. Idempotent."""
        opened, on_closed = self._by_transfer.pop(transfer_id, (None, None))
        if opened is not None and on_closed is not None:
            revoke(self._endpoint, opened)
            on_closed()

    async def open_to_read(self, places: Sequence[Range]) -> tuple[list[int], list[int], Callable[[], None]]:
        """Addresses and keys of these ranges, and what closes them again. Raises RdmaError."""
        opened = await grant(self._endpoint, self._memory, places, Access.READ)
        addresses = [self._memory.address + place.offset for place in places]
        return addresses, opened.remote_keys, lambda: revoke(self._endpoint, opened)

    def close(self) -> None:
        """Ends the queue pair and all that was open through it."""
        self._endpoint.close()
        for transfer_id in list(self._by_transfer):
            self.conceal(transfer_id)
