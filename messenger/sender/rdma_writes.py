"""Writes of one lane whose bytes go by RDMA: the peer is told of each when they are in its memory.

Owns: which writes are in flight. Does not know: the connection, what else is sent over it.
"""

import asyncio
import functools
from collections.abc import Callable

from messenger.rdma.errors import RdmaError
from messenger.rdma.remote import RemotePages
from messenger.sender.requests import WriteRequest
from messenger.wire.messages import Exposed
from mooncake.errors import TransferError


class RemoteWrites:
    """Writes by RDMA. `placed` is called for each write that ends: with None if its bytes are in their pages,
    or with the error that stopped the write.

    `stuck` is called for a write that is in flight and cannot go on. Then the lane must end.
    """

    def __init__(
        self,
        remote: RemotePages,
        timeout_s: float,
        placed: Callable[[WriteRequest, BaseException | None], None],
        stuck: Callable[[WriteRequest, BaseException | None], None],
    ) -> None:
        self._remote = remote
        self._timeout_s = timeout_s
        self._placed = placed
        self._stuck = stuck
        self._under_way: dict[WriteRequest, asyncio.Task[None]] = {}
        self._is_closed = False

    @property
    def failure(self) -> RdmaError | None:
        """Reason why nothing can be written any more; None while writes are possible."""
        return self._remote.failure

    def begin(self, request: WriteRequest) -> None:
        placing = asyncio.create_task(self._place(request))
        placing.add_done_callback(functools.partial(self._ended, request))
        self._under_way[request] = placing

    def exposed(self, answer: Exposed) -> None:
        """Record the peer's answer: the pages that it has opened, or the reason why it has not."""
        self._remote.exposed(answer)

    def forget(self, transfer_id: int) -> None:
        """Stop writing a transfer that has ended. The device completes the writes that it has already."""
        self._remote.forget(transfer_id)
        for request, placing in self._under_way.items():
            if request.write.transfer_id == transfer_id:
                placing.cancel()

    def is_writing(self, transfer_id: int) -> bool:
        """Return whether bytes of this transfer are in flight: its pages must stay open for them."""
        return any(request.write.transfer_id == transfer_id for request in self._under_way)

    async def close(self) -> None:
        """Stop, and wait until no byte moves any more. `take_all` then returns the requests in flight."""
        self._is_closed = True
        self._remote.close()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def take_all(self) -> list[WriteRequest]:
        """Take the requests that were in flight."""
        requests = list(self._under_way)
        self._under_way.clear()
        return requests

    async def _place(self, request: WriteRequest) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._remote.write(request.write, request.layer_bytes)

    def _ended(self, request: WriteRequest, placing: asyncio.Task[None]) -> None:
        if self._is_closed:
            return  # somebody takes the request over
        error = TransferError("the transfer has ended") if placing.cancelled() else placing.exception()
        if isinstance(error, TimeoutError) or self.failure is not None:
            self._stuck(request, error)
            return
        del self._under_way[request]
        self._placed(request, error)
