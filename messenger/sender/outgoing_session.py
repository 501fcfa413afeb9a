"""The session with another messenger, on the sending side: its lanes, and the requests for them.

A lane with capacity takes the next request. So requests spread over streams and addresses according to the
speed of each, and the requests of a lost lane go to the other lanes. The session fails a transfer if:

- no lane is left;
- a request has lost several lanes in a row, or a lane that cannot carry the request (`Lane.refused`), and no
  standby path can take the request over;
- the receiver refuses a write, or has given the grant up.

The owner of a transfer can give it up too: when it is cancelled, or finds its own page damaged.

Owns: the session with one messenger. Does not know: keys, leases (a request's memory must not change before
its `done`).
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
from messenger.sender.open_transfers import OpenTransfers
from messenger.sender.queues import BULK_WAITS_S, Queues
from messenger.sender.requests import (
    FetchRequest,
    LaneRequest,
    ProbeRequest,
    Urgency,
    WriteOutcome,
    WriteRequest,
    done_already,
)
from messenger.sender.transfer import RequestResult, Transfer
from messenger.transport.transports import Path, Traffic, Transport
from messenger.wire.messages import Abandon, Fetch, Open, brief
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout

log = logging.getLogger(__name__)

MAX_PENDING_REQUESTS = 16
"""The most pending requests of one class, queued or in flight. Callers with further requests wait."""
_NUM_LOST_LANES = 64
"""The number of lost lanes that are remembered, because the receiver may not have noticed their loss."""
_YIELDED_TURNS = 2
"""Turns of the event loop for which lanes copy no bulk after a latency request was completed.

The request's caller runs in the first turn, and the work that it starts runs in the second.
"""
_MOST_LANES_LOST = 4
"""The number of lanes lost in a row after which a request counts as the cause.

The request was in flight on each of these lanes.
"""
SESSION_BYTES = 16
"""Bytes of the random name of a session."""


class OutgoingSession:
    """A session with one messenger.

    It ends with its last lane; then the next caller begins another session.
    """

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
        self._limits = {urgency: asyncio.Semaphore(MAX_PENDING_REQUESTS) for urgency in Urgency}
        self._transfers = OpenTransfers(self._lanes)
        self._transfer_ids = itertools.count(1)
        self._now_s = asyncio.get_running_loop().time
        self._bulk_timer: asyncio.TimerHandle | None = None
        self._has_served = False
        """Whether a latency request was completed since a lane last asked whether to yield."""
        self._num_yields = 0
        """Turns in a row that lanes have yielded."""

    @property
    def lanes(self) -> Sequence[Lane]:
        return self._lanes

    @property
    def layout(self) -> KVLayout:
        """The layout of the peer's blocks. Raises TransferError if no lane is left."""
        if self.closed_reason is not None:
            raise TransferError(self.closed_reason)
        return self._lanes[0].layout

    def frame_bytes(self, urgency: Urgency) -> int:
        """Return how many bytes to request at once.

        For bulk the number is small while latency requests are expected, so that these are not held up.
        """
        return self._queues.frame_bytes(urgency, self._now_s())

    @property
    def num_received_bytes(self) -> int:
        """The bytes that have arrived over the present connections.

        Blocks that come over shared memory or RDMA do not count, as such a fetch either ends quickly or
        hangs.
        """
        return sum(lane.num_received_bytes for lane in self._lanes)

    @property
    def is_idle(self) -> bool:
        """Whether no transfer or request uses the session now."""
        return not self._transfers.are_any and not self.throughput.pending_bytes

    # -- what is asked of the peer ----------------------------------------------------------------

    def transfer(
        self,
        grant_id: int,
        ref_text: str,
        on_change: Callable[[], None],
        urgency: Urgency = Urgency.LATENCY,
        heads: range | None = None,
    ) -> Transfer:
        """Return a transfer to the grant `grant_id`, for a `with` statement.

        An exception in the statement's body gives the transfer up and tells the peer the reason. `ref_text`
        names the request for the receiver's log. `on_change` is called when a frame is complete or the
        transfer has failed. `heads`: the model's heads whose bytes are written; None if both sides have the
        same heads, and all are written.
        """
        part = None if heads is None else (heads.start, heads.stop)
        opening = Open(next(self._transfer_ids), grant_id, brief(ref_text))
        return Transfer(self, opening, urgency, on_change, part)

    def transfer_begun(self, transfer: Transfer) -> None:
        """Record the beginning of a transfer. Raises TransferError if the session has ended."""
        if self.closed_reason is not None:
            raise TransferError(self.closed_reason)
        self._transfers.begun(transfer)

    def transfer_ended(self, transfer: Transfer, reason: str | None) -> None:
        """Record the end of a transfer. `reason`: why it was given up; None if it is complete."""
        self._transfers.ended(transfer, reason)

    async def fetch(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        layers: range,
        urgency: Urgency = Urgency.LATENCY,
        heads: range | None = None,
    ) -> dict[int, bytes]:
        """Read `layers` of the blocks of `keys` that the peer has into `views`. Raises TransferError.

        Returns the checksums of each block that has arrived, by the index of the block: the little-endian
        xxh3-64 of each layer. The bytes in the view match them.

        With `heads`, numbered as in the model, only these heads are read; `layers` is then a single layer,
        unless `heads` are all heads of the peer. All blocks come in one answer, so callers should ask for at
        most `frame_bytes` at once. A cancelled call first waits until nothing will be written to `views` any
        more.
        """
        if not keys:
            return {}
        answer = RequestResult()
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
                request.fail("cancelled")
            await answer.settled()
            raise
        if answer.failure is not None:
            raise TransferError(answer.failure)
        return answer.checksums

    async def probe(self, payload: memoryview) -> None:
        """Send bytes that the peer discards. Raises TransferError."""
        answer = RequestResult()
        await self.submit(ProbeRequest(payload, Urgency.BULK, functools.partial(answer.give, {})))
        await answer.is_there.wait()
        if answer.failure is not None:
            raise TransferError(answer.failure)

    async def submit(self, request: LaneRequest) -> None:
        """Send or queue a request, waiting while too many requests of its class are pending.

        The request's `done` is called in any case.
        """
        limit = self._limits[request.urgency]
        try:
            await limit.acquire()
        except asyncio.CancelledError:
            request.fail("cancelled")
            raise
        self._count_until_done(request, limit)
        if self.closed_reason is not None:
            request.fail(self.closed_reason)
            return
        self._queues.put(request)
        lane = self._wake_one(request.urgency)
        if request.urgency is Urgency.BULK:
            self._look_after_bulk()
        elif lane is not None:
            await lane.take_turns(request)

    def _count_until_done(self, request: LaneRequest, limit: asyncio.Semaphore) -> None:
        """Count a request as pending until it is done, and release `limit` then.

        For this the request's `done` is replaced by a function that also calls the former `done`.
        """
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
            limit.release()
            self._counters.ended(num_bytes, self._now_s(), moved_bytes=moved_bytes)
            done(*result)
            self._served(request.urgency)

        request.done = finish

    def _served(self, urgency: Urgency) -> None:
        """Record that a request was completed, so that its caller runs before bulk is sent."""
        if urgency is Urgency.LATENCY:
            self._has_served = True
            if self._queues.has_bulk:  # after the caller of this request
                asyncio.get_running_loop().call_soon(self._wake_one, Urgency.BULK)

    # -- lanes ------------------------------------------------------------------------------------

    async def run_lane(self, lane: Lane) -> str:
        """Use `lane` until it is lost. Returns the reason of the loss."""
        self._lanes.append(lane)
        self._queues.set_lanes(self._lanes)
        for number in self._lost_lanes:  # their requests may be repeated over this lane
            lane.post(Abandon(number))
        lane.wake()
        reason = "ended by this side"
        try:
            reason = await lane.run()
        finally:
            self._lanes.remove(lane)
            self._queues.set_lanes(self._lanes)
            self._fail_over(lane, f"connection to {self.name} ({lane.path}) was lost: {reason}")
        return reason

    def _fail_over(self, lane: Lane, reason: str) -> None:
        """Requeue the requests of a lost lane for the other lanes; end the session if no lane is left."""
        unanswered = lane.take_outstanding()
        if not self._lanes:
            self._close(reason, unanswered)
            return
        self._lost_lanes.append(lane.number)
        for other in self._lanes:
            other.post(Abandon(lane.number))
        self._transfers.lane_lost(lane)
        for request in reversed(unanswered):
            request.num_lanes_lost += 1
            if request.num_lanes_lost < _MOST_LANES_LOST and request is not lane.refused:
                self._queues.put_back(request)
            else:  # the request may be why lanes were lost
                self._detour(request, lane, reason)
        for other in self._lanes:
            other.wake()

    def _detour(self, request: LaneRequest, lost: Lane, reason: str) -> None:
        """Send a request over a standby path instead of failing it at once; fail it if there is no such path.

        Perhaps only the path of `lost` cannot carry the request.
        """
        others = [lane for lane in self._lanes if lane.path.is_standby]
        is_wanted = not isinstance(request, WriteRequest) or request.is_wanted()
        if not lost.path.is_standby and others and is_wanted:
            min(others, key=lambda lane: lane.outstanding_bytes).send(request)
        else:
            request.fail(reason)

    def give_up_path(self, path: Path, reason: str) -> None:
        """End the lanes of a path if there are lanes of other paths to take over the requests."""
        its_lanes = [lane for lane in self._lanes if lane.path == path]
        if len(its_lanes) < len(self._lanes):
            for lane in its_lanes:
                lane.give_up(reason)

    def _close(self, reason: str, unanswered: list[LaneRequest]) -> None:
        self.closed_reason = reason
        self._transfers.fail_all(reason)
        for request in [*unanswered, *self._queues.take_all()]:
            request.fail(reason)

    def _wake_one(self, urgency: Urgency) -> Lane | None:
        """Wake the lane that takes the next request of this class, and return this lane.

        Returns None if there is no such request, or no lane for it.
        """
        lane = self._queues.lane_for(urgency, self._now_s())
        if lane is not None:
            lane.wake(urgency)
        return lane

    def _look_after_bulk(self) -> None:
        """Set a timer that sends waiting bulk in time, even while latency requests are in flight."""
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

    def next_request(self, lane: Lane) -> LaneRequest | None:
        while (request := self._queues.take(lane, self._now_s())) is not None:
            if self._take_up(request):
                return request
        return None

    def _take_up(self, request: LaneRequest) -> bool:
        """Prepare a request to be sent. Returns False for a write that is no longer wanted: the write fails.

        The transfer of a write counts as known to the peer from now on.
        """
        if isinstance(request, WriteRequest):
            if not request.is_wanted():
                request.fail("not wanted any more")
                return False
            self._transfers.announced(request.write.transfer_id)
        return True

    def should_yield(self) -> bool:
        """Return whether lanes should let a served caller run before they copy more bulk.

        After some turns in a row the result is False once, so that bulk gets a turn.
        """
        should_yield = self._num_yields < _YIELDED_TURNS and (self._num_yields > 0 or self._has_served)
        self._has_served = False
        self._num_yields = self._num_yields + 1 if should_yield else 0
        return should_yield

    def moved(self, transport: Transport, num_bytes: int, *, received: bool) -> None:
        self._counters.moved(transport, num_bytes, received=received)

    def damaged(self) -> None:
        self._traffic.num_checksum_failures += 1
        log.warning("a block that %s sent did not match its checksums", self.name)

    def ended(self, transfer_id: int, reason: str) -> None:
        self._transfers.fail(transfer_id, f"{self.name} ended the transfer: {reason}")

    def written(self, transfer_id: int) -> None:
        self._transfers.written(transfer_id)
