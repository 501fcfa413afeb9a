"""Another messenger, on the side that asks it: its lanes, and what is to be sent on them.

A lane that has room takes the request that is next: so they spread over streams and addresses by how fast
each of them is, and what a lost lane had under way goes to the others. Only when no lane is left do transfers
fail.

Owns: the session with one messenger. Does not know: keys, leases; what must stay in place until a request is
through is said by that request's `done`.
"""

import asyncio
import functools
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from messenger.paths.throughput import TransferCounters
from messenger.sender.lane import Lane
from messenger.sender.queues import BULK_WAITS_S, Queues
from messenger.sender.requests import (
    FetchRequest,
    ProbeRequest,
    Request,
    Urgency,
    WriteOutcome,
    WriteRequest,
    done_already,
)
from messenger.sender.transfer import Answer, Transfer
from messenger.transport.transports import Path, Traffic, Transport
from messenger.wire.messages import Abandon, Close, Fetch, Open, brief
from messenger.wire.protocol import NOT_URGENT_S
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout

log = logging.getLogger(__name__)

MAX_QUEUED_REQUESTS = 16
"""of one class, under way or waiting: whoever comes then waits"""
_NUM_LOST_LANES = 64
"""whose end the receiver may not have noticed yet"""
_TURNS_GIVEN = 2
"""of the event loop, to who was waiting: one until it goes on, one for what it does then"""
_MOST_LANES_LOST = 4
"""under one request: then it is no chance that they are lost"""
SESSION_BYTES = 16


class PeerSession:
    """One session. It ends with its last lane; whoever needs the messenger then begins another."""

    def __init__(self, name: str, traffic: Traffic) -> None:
        self.name = name
        self.session = secrets.token_bytes(SESSION_BYTES)
        self.closed_reason: str | None = None
        self._traffic = traffic
        self._counters = TransferCounters(traffic, traffic.by_peer[name])
        self.throughput = self._counters.throughput
        self._lanes: list[Lane] = []
        self._lost_lanes: deque[int] = deque(maxlen=_NUM_LOST_LANES)
        self._queues: Queues[Lane] = Queues()
        self._room = {urgency: asyncio.Semaphore(MAX_QUEUED_REQUESTS) for urgency in Urgency}
        self._transfers: dict[int, Transfer] = {}
        self._unsaid: dict[int, Close] = {}
        """of transfers that have ended, but of which bytes are still on their way by RDMA"""
        self._announcement: asyncio.TimerHandle | None = None
        """when the peer hears of transfers that have not written yet"""
        self._transfer_ids = itertools.count(1)
        self._now_s = asyncio.get_running_loop().time
        self._bulk_timer: asyncio.TimerHandle | None = None
        self._has_served = False
        """somebody who waited, since a lane asked whether to give way"""
        self._num_turns_given = 0
        """one after the other"""

    @property
    def lanes(self) -> Sequence[Lane]:
        return self._lanes

    @property
    def layout(self) -> KVLayout:
        """Of the peer's blocks. Raises TransferError if there is no lane any more."""
        if self.closed_reason is not None:
            raise TransferError(self.closed_reason)
        return self._lanes[0].layout

    def frame_bytes(self, urgency: Urgency) -> int:
        """How much should be asked for at once: of bulk little enough for those in a hurry to get past it."""
        return self._queues.frame_bytes(urgency, self._now_s())

    @property
    def num_received_bytes(self) -> int:
        """That have come over the connections of now. Over shared memory and RDMA, where the bytes of blocks
        are not among them, a request is quick or stuck."""
        return sum(lane.num_received_bytes for lane in self._lanes)

    @property
    def is_idle(self) -> bool:
        """Whether nobody needs the session now."""
        return not self._transfers and not self.throughput.in_flight_bytes

    # -- what is asked of the peer ----------------------------------------------------------------

    def transfer(
        self,
        grant_id: int,
        ref_text: str,
        on_change: Callable[[], None],
        urgency: Urgency = Urgency.LATENCY,
        heads: range | None = None,
    ) -> Transfer:
        """A transfer to `grant_id`, for a `with` statement; left by an exception it is given up, and the peer
        is told why.

        `on_change` is called when a frame is through or the transfer has failed. `heads` of the model are the
        part of each layer that is written; None if both sides have the same, and all of them are.
        """
        part = None if heads is None else (heads.start, heads.stop)
        opening = Open(next(self._transfer_ids), grant_id, brief(ref_text))
        return Transfer(self, opening, urgency, on_change, part)

    def begun(self, transfer: Transfer) -> None:
        """Raises TransferError if the session has ended."""
        if self.closed_reason is not None:
            raise TransferError(self.closed_reason)
        self._transfers[transfer.opening.transfer_id] = transfer
        if self._announcement is None:
            self._announcement = asyncio.get_running_loop().call_later(NOT_URGENT_S, self._announce)

    def left(self, transfer: Transfer, reason: str | None) -> None:
        """`reason`: why it is given up, None if all is said and done."""
        transfer_id = transfer.opening.transfer_id
        self._transfers.pop(transfer_id, None)
        if self._queues.has_rdma:
            for lane in self._lanes:
                lane.forget(transfer_id)
        if self._lanes and (transfer.is_known or reason is not None):
            self._announce_one(transfer)
            self._say(Close(transfer_id, None if reason is None else brief(reason)))

    def _say(self, close: Close) -> None:
        """When nothing of the transfer is on its way by RDMA: the peer closes its pages then, and a write to
        pages that are closed breaks the queue pair for all transfers."""
        if self._queues.has_rdma and any(lane.is_writing(close.transfer_id) for lane in self._lanes):
            self._unsaid[close.transfer_id] = close
        elif self._lanes:
            self._lanes[0].post(close, may_wait=close.reason is None)

    def _announce(self) -> None:
        """From now on our loss is the failure of these transfers' grants. A write says the same."""
        self._announcement = None
        for transfer in self._transfers.values():
            self._announce_one(transfer)

    def _announce_one(self, transfer: Transfer) -> None:
        if self._lanes and not transfer.is_known:
            transfer.is_known = True
            self._lanes[0].post(transfer.opening)

    async def fetch(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        layers: range,
        urgency: Urgency = Urgency.LATENCY,
        heads: range | None = None,
    ) -> dict[int, bytes]:
        """Reads `layers` of those of these blocks that the peer has into `views`. Returns their checksums by
        index: each layer's xxh3-64, little-endian, with which the bytes in the view have been compared.

        With `heads` of the model only that part of them: of one layer, unless they are all that the peer has.
        Everything in one answer: no more than `frame_bytes` should be asked for at once. Raises
        TransferError. Cancelled, it waits until nothing will be written to `views` any more.
        """
        if not keys:
            return {}
        answer = Answer()
        request = FetchRequest(
            Fetch(
                list(keys), layers.start, layers.stop, None if heads is None else (heads.start, heads.stop)
            ),
            views,
            len(views[0]) // len(layers),
            urgency,
            answer.give,
        )
        try:
            await self.submit(request)
            await answer.is_there.wait()
        except asyncio.CancelledError:
            if self._queues.remove(request):
                request.lost("cancelled")
            await answer.settled()
            raise
        if answer.failure is not None:
            raise TransferError(answer.failure)
        return answer.checksums

    async def probe(self, payload: memoryview) -> None:
        """Sends bytes for nobody. Raises TransferError."""
        answer = Answer()
        await self.submit(ProbeRequest(payload, Urgency.BULK, functools.partial(answer.give, {})))
        await answer.is_there.wait()
        if answer.failure is not None:
            raise TransferError(answer.failure)

    async def submit(self, request: Request) -> None:
        """Sends or queues it, waiting while too many of its class are under way. It is `done` in any case."""
        room = self._room[request.urgency]
        try:
            await room.acquire()
        except asyncio.CancelledError:
            request.lost("cancelled")
            raise
        self._track(request, room)
        if self.closed_reason is not None:
            request.lost(self.closed_reason)
            return
        self._queues.put(request)
        lane = self._wake_one(request.urgency)
        if request.urgency is Urgency.BULK:
            self._look_after_bulk()
        elif lane is not None:
            await lane.take_turns(request)

    def _track(self, request: Request, room: asyncio.Semaphore) -> None:
        """Counts it as in flight until it is done, and then gives its place in `room` back."""
        done, num_bytes, begun_s = request.done, request.num_bytes, self._now_s()
        self.throughput.begun(num_bytes, begun_s)
        self._queues.begun(request, begun_s)

        def finish(*result: Any) -> None:
            request.done = done_already
            moved_bytes = 0
            if isinstance(request, FetchRequest):
                moved_bytes = sum([len(request.views[index]) for index in result[0]])
            elif isinstance(request, WriteRequest) and result[0] is WriteOutcome.PLACED:
                moved_bytes = num_bytes
            self._queues.ended(request)
            room.release()
            self._counters.ended(num_bytes, self._now_s(), moved_bytes=moved_bytes)
            done(*result)
            self._served(request.urgency)

        request.done = finish

    def _served(self, urgency: Urgency) -> None:
        """Somebody has been told what he waited for."""
        if urgency is Urgency.LATENCY:
            self._has_served = True
            if self._queues.has_bulk:  # whoever waited for this goes on first
                asyncio.get_running_loop().call_soon(self._wake_one, Urgency.BULK)

    # -- lanes ------------------------------------------------------------------------------------

    async def run_lane(self, lane: Lane) -> str:
        """Uses `lane` until it is lost. Returns the reason."""
        self._lanes.append(lane)
        self._queues.set_lanes(self._lanes)
        for number in self._lost_lanes:  # what was on them may come again over this one
            lane.post(Abandon(number))
        lane.wake()
        reason = "ended by this side"
        try:
            reason = await lane.run()
        finally:
            self._lanes.remove(lane)
            self._queues.set_lanes(self._lanes)
            self._hand_over(lane, f"connection to {self.name} ({lane.path}) was lost: {reason}")
        return reason

    def _hand_over(self, lane: Lane, reason: str) -> None:
        """Gives what a lost lane had under way to the others, or ends the session."""
        unanswered = lane.take_outstanding()
        if not self._lanes:
            self._close(reason, unanswered)
            return
        self._lost_lanes.append(lane.number)
        for other in self._lanes:
            other.post(Abandon(lane.number))
        for transfer in self._transfers.values():
            self._lanes[0].post(transfer.opening)
        for close in lane.take_closes():
            self._lanes[0].post(close)
        for transfer_id in list(self._unsaid):
            self.written(transfer_id)
        for request in reversed(unanswered):
            request.num_lanes_lost += 1
            if request.num_lanes_lost < _MOST_LANES_LOST and request is not lane.refused:
                self._queues.put_back(request)
            else:  # it may be what they died of
                self._detour(request, lane, reason)
        for other in self._lanes:
            other.wake()

    def _detour(self, request: Request, lost: Lane, reason: str) -> None:
        """What RDMA cannot do TCP may: that is tried before the request fails."""
        others = [lane for lane in self._lanes if lane.path.transport is Transport.TCP]
        is_wanted = not isinstance(request, WriteRequest) or request.is_wanted()
        if lost.path.transport is Transport.RDMA and others and is_wanted:
            min(others, key=lambda lane: lane.outstanding_bytes).send(request)
        else:
            request.lost(reason)

    def give_up_path(self, path: Path, reason: str) -> None:
        """Ends its lanes, if there are others: what they have under way goes to those."""
        its_lanes = [lane for lane in self._lanes if lane.path == path]
        if len(its_lanes) < len(self._lanes):
            for lane in its_lanes:
                lane.give_up(reason)

    def _close(self, reason: str, unanswered: list[Request]) -> None:
        self.closed_reason = reason
        self._unsaid.clear()
        for transfer in list(self._transfers.values()):
            transfer.fail(reason)
        for request in [*unanswered, *self._queues.take_all()]:
            request.lost(reason)

    def _wake_one(self, urgency: Urgency) -> Lane | None:
        """The lane that takes what comes next of this class, if both are there."""
        lane = self._queues.lane_for(urgency, self._now_s())
        if lane is not None:
            lane.wake(urgency)
        return lane

    def _look_after_bulk(self) -> None:
        """What waits for others only is sent in time, whatever becomes of those."""
        if self._queues.has_bulk and self._bulk_timer is None:
            self._bulk_timer = asyncio.get_running_loop().call_later(BULK_WAITS_S, self._wake_bulk)

    def _wake_bulk(self) -> None:
        self._bulk_timer = None
        self._wake_one(Urgency.BULK)
        self._look_after_bulk()

    # -- what lanes say (lane.Owner) --------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        return self._queues.has_any

    def next_request(self, lane: Lane) -> Request | None:
        while (request := self._queues.take(lane, self._now_s())) is not None:
            if self._may_leave(request):
                return request
        return None

    def _may_leave(self, request: Request) -> bool:
        """Else it is not wanted any more, and lost."""
        if isinstance(request, WriteRequest):
            if not request.is_wanted():
                request.lost("not wanted any more")
                return False
            transfer = self._transfers.get(request.write.transfer_id)
            if transfer is not None:
                transfer.is_known = True
        return True

    def should_yield(self) -> bool:
        """So many turns, and then one is bulk's whatever comes: it goes on too."""
        should_yield = self._num_turns_given < _TURNS_GIVEN and (
            self._num_turns_given > 0 or self._has_served
        )
        self._has_served = False
        self._num_turns_given = self._num_turns_given + 1 if should_yield else 0
        return should_yield

    def moved(self, transport: Transport, num_bytes: int, *, received: bool) -> None:
        self._counters.moved(transport, num_bytes, received=received)

    def damaged(self) -> None:
        self._traffic.num_checksum_failures += 1
        log.warning("a block that %s sent did not match its checksums", self.name)

    def ended(self, transfer_id: int, reason: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.fail(f"{self.name} ended the transfer: {reason}")

    def written(self, transfer_id: int) -> None:
        close = self._unsaid.pop(transfer_id, None)
        if close is not None:
            self._say(close)
