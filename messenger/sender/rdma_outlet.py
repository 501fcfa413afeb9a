"""The outlet over RDMA, which announces each write to the peer when the bytes are in the peer's memory.

Owns: which writes are in flight beside the connection. Does not know: what else is sent over the connection.
"""

import asyncio
import functools
from collections.abc import Sequence

import msgspec

from messenger.rdma.cards import Card
from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaError
from messenger.rdma.remote import RdmaReadInlet, RemotePages
from messenger.sender.outlet import BulkPace, LaneParts, Opening, Outlet, SendingEnd
from messenger.sender.requests import LaneRequest, WriteOutcome, WriteRequest
from messenger.transport.transports import Remedy
from messenger.wire.messages import Exposed, Introduction, Welcome
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout


class RdmaOutlet(Outlet):
    """The outlet of a lane whose device writes bytes to pages that the peer has opened."""

    bulk_pace = BulkPace(512 << 10)

    def __init__(self, lane: LaneParts, endpoint: Endpoint, layout: KVLayout) -> None:
        """Prepare writes through the connected `endpoint`; the peer's blocks have this `layout`."""
        super().__init__(lane)
        self._pages = RemotePages(endpoint, layout, lambda message: lane.post(message))
        self._in_flight: dict[WriteRequest, asyncio.Task[None]] = {}
        self._is_closed = False

    def begin(self, request: LaneRequest, *, is_next: bool) -> Sequence[bytes | memoryview]:
        if not isinstance(request, WriteRequest):
            return super().begin(request, is_next=is_next)
        self._lane.outstanding.begin(request)
        placing = asyncio.create_task(self._place(request))
        placing.add_done_callback(functools.partial(self._ended, request))
        self._in_flight[request] = placing
        return []

    def exposed(self, answer: Exposed) -> None:
        self._pages.exposed(answer)

    def blame(self, request: LaneRequest, error: BaseException | None) -> None:
        if isinstance(error, RdmaError) and error.remedy is Remedy.GIVE_UP:
            self.refused = request

    def is_writing(self, transfer_id: int) -> bool:
        return any(request.write.transfer_id == transfer_id for request in self._in_flight)

    def forget(self, transfer_id: int) -> None:
        """Stop writing a transfer that has ended. The device completes the writes already posted."""
        self._pages.forget(transfer_id)
        for request, placing in self._in_flight.items():
            if request.write.transfer_id == transfer_id:
                placing.cancel()

    async def close(self) -> None:
        if self._pages.failure is not None:
            self.remedy = self._pages.failure.remedy
        self._is_closed = True
        self._pages.close()
        await asyncio.gather(*self._in_flight.values(), return_exceptions=True)

    def take_all(self) -> Sequence[LaneRequest]:
        requests = list(self._in_flight)
        self._in_flight.clear()
        return requests

    async def _place(self, request: WriteRequest) -> None:
        async with asyncio.timeout(self._lane.answer_timeout_s):
            await self._pages.write(request.write, request.layer_bytes)

    def _ended(self, request: WriteRequest, placing: asyncio.Task[None]) -> None:
        if self._is_closed:
            return  # `take_all` returns the request
        error = TransferError("the transfer has ended") if placing.cancelled() else placing.exception()
        if isinstance(error, TimeoutError):
            self.remedy = Remedy.OTHER_PATH
            self._lane.give_up(f"no answer within {self._lane.answer_timeout_s:g} s")
        elif self._pages.failure is not None:
            self.blame(request, error)
            self._lane.give_up(str(self._pages.failure))
        else:
            del self._in_flight[request]
            self._placed(request, error)

    def _placed(self, request: WriteRequest, error: BaseException | None) -> None:
        """Tell the peer that the bytes are in its memory, or complete the request with `error`."""
        if error is None:
            self._lane.outstanding.sent(request)
            self._lane.post(request.write)
        else:
            self._lane.outstanding.give_up(request)
            self._lane.pump()
            request.done(WriteOutcome.FAILED, str(error))
        self._lane.written(request.write.transfer_id)
        if error is not None and not isinstance(error, TransferError):
            raise error  # an error of ours: the event loop logs it


class RdmaOpening(Opening):
    """The opening of a lane whose bytes go through a queue pair of `card` to `peer`."""

    def __init__(self, card: Card, peer: str) -> None:
        self._card, self._peer = card, peer
        self._endpoint = card.endpoint(peer)

    def introduction(self, introduction: Introduction) -> Introduction:
        return msgspec.structs.replace(introduction, endpoint=self._endpoint.local_info())

    async def join(self, welcome: Welcome) -> SendingEnd:
        if welcome.endpoint is None or welcome.scratch is None:
            raise TransferError(f"{self._peer} does not answer by RDMA")
        self._endpoint.connect(welcome.endpoint)
        await self._card.write_scratch(self._endpoint, welcome.scratch)
        inlet = RdmaReadInlet(self._endpoint, self._card.memory)
        return SendingEnd(
            inlet,
            functools.partial(RdmaOutlet, endpoint=self._endpoint, layout=welcome.identity.layout),
        )

    def close(self) -> None:
        self._endpoint.close()
