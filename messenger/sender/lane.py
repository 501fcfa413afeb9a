"""A lane: one connection to another messenger, on the side that asks.

Writes are answered in the order in which they were sent, and so are fetches. A lane that is lost hands its
requests in flight back to its owner, which may send them on another lane.

Owns: one connection to a peer. Does not know: other lanes, the queues, how bytes move (`Outlet`, `Inlet`).
"""

import asyncio
from typing import NoReturn, Protocol

from messenger.sender.answer_handler import AnswerHandler, AnswerListener
from messenger.sender.outlet import BulkPace, LaneParts, SendingEnd
from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import LaneRequest, Urgency
from messenger.sender.send_queue import SendQueue
from messenger.transport.frames import Frames
from messenger.transport.transports import Path, Remedy
from messenger.wire.messages import Close, Exposed, FetchDone, Found, Message, TransferEnded, WriteAck
from messenger.wire.protocol import Frame, encode_frame
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout

_SENT_BYTES = 256 << 10
"""Bytes after which no further request is added to one system call, or copied in one turn."""
_COPYING_SPEED = 8
"""Speed at which an outlet copies between segments, as a multiple of the speed through a socket.

With this value other tasks have a turn after 16 MiB of copying.
"""
_FETCH_DONE = encode_frame(FetchDone())
_MOST_OUTSTANDING = 256
"""The most requests in flight on one lane, including those whose bytes are placed."""


class Owner(AnswerListener, Protocol):
    """The interface of the session with a peer, for its lanes."""

    @property
    def has_more(self) -> bool:
        """Whether a request waits in the queues."""

    def next_request(self, lane: "Lane") -> LaneRequest | None:
        """Return the request that `lane` should send now, taken from the queues; None without one."""

    def frame_bytes(self, urgency: Urgency) -> int:
        """Return how many bytes of this class to request at once.

        A lane that copies bulk itself lets other tasks run after as many bytes.
        """

    def should_yield(self) -> bool:
        """Return whether a caller that has just been served should run before more bulk is copied."""

    def ended(self, transfer_id: int, reason: str) -> None:
        """Record that the receiver has given up a transfer for `reason`."""

    def written(self, transfer_id: int) -> None:
        """Record that a write of this transfer is no longer in flight beside the connection."""


class Lane:
    """One connection to a peer after its handshake. `run` ends with the connection."""

    def __init__(
        self,
        number: int,
        path: Path,
        frames: Frames,
        ends: SendingEnd,
        layout: KVLayout,
        owner: Owner,
        answer_timeout_s: float,
    ) -> None:
        self.number = number
        self.path = path
        self.layout = layout
        """Layout of the peer's blocks."""
        self._frames = frames
        self._stream = frames.stream
        self._owner = owner
        self._outstanding = Outstanding(
            answer_timeout_s, lambda: self.give_up(f"no acknowledgement within {answer_timeout_s:g} s")
        )
        self._answers = AnswerHandler(self._outstanding, ends.inlet, owner)
        self._send_queue = SendQueue(
            self._stream,
            answer_timeout_s,
            self._pump,
            lambda: self.give_up(f"nothing was taken within {answer_timeout_s:g} s"),
        )
        self._parts = LaneParts(
            self._stream,
            self._outstanding,
            self._answers,
            self._send_queue,
            answer_timeout_s,
            self.post,
            self._pump,
            self.give_up,
            owner.written,
        )
        self._outlet = ends.make_outlet(self._parts)
        self._left: Frame | None = None
        """A received frame whose payload is still to be awaited."""
        self._is_pumping_soon = False
        self._given_up: str | None = None
        self._is_running = True

    @property
    def bulk_pace(self) -> BulkPace:
        return self._outlet.bulk_pace

    @property
    def remedy(self) -> Remedy | None:
        """The remedy for the failure that ended the lane; None if the transport knows none."""
        return self._outlet.remedy

    @property
    def refused(self) -> LaneRequest | None:
        """The request that the transport cannot carry, and that would fail again; None if there is none."""
        return self._outlet.refused

    @property
    def has_answered(self) -> bool:
        """Whether the lane has completed any request."""
        return self._outstanding.num_answered > 0 or self._outlet.has_read

    @property
    def was_asked(self) -> bool:
        """Whether the lane was given any request."""
        return self._outstanding.num_begun > 0

    @property
    def num_received_bytes(self) -> int:
        """The bytes of any kind received over the connection: while the number grows, the peer is alive."""
        return self._stream.num_received_bytes

    @property
    def outstanding_bytes(self) -> int:
        return sum(self._outstanding.num_bytes.values())

    def outstanding_bytes_of(self, urgency: Urgency) -> int:
        return self._outstanding.num_bytes[urgency]

    @property
    def num_outstanding(self) -> int:
        """The number of requests in flight on this lane."""
        return self._outstanding.num_begun - self._outstanding.num_answered

    @property
    def has_capacity(self) -> bool:
        """Whether the lane may have more requests in flight."""
        return self.num_outstanding < _MOST_OUTSTANDING

    def wake(self, urgency: Urgency = Urgency.LATENCY) -> None:
        """Send queued requests.

        Bulk that this side copies gets turns of its own, so that other tasks run in between.
        """
        if self._outlet.copies and urgency is Urgency.BULK:
            self._pump_soon()
        else:
            self._pump()

    async def take_turns(self, request: LaneRequest) -> None:
        """Let other tasks run if this connection's turn is over.

        A `request` that this side has copied counts towards the turn.
        """
        if not request.moving_bytes:
            self._stream.moved(request.num_bytes // _COPYING_SPEED)
        await self._stream.take_turns()

    def post(self, message: Message, *, may_wait: bool = False) -> None:
        """Send a message without an answer, ahead of all unsent requests.

        The message leaves with the next request. If there is none, it leaves at the end of this turn of the
        event loop, or within `NOT_URGENT_S` if it `may_wait`.
        """
        self._send_queue.keep(encode_frame(message))
        if isinstance(message, Close):
            self._outstanding.closed(message)
        if not may_wait:
            self._send_queue.is_due = True
            self._pump_soon()

    async def run(self) -> str:
        """Send and receive until the connection is lost. Returns the reason of the loss."""
        try:
            await self._receive()
        except (OSError, TransferError) as error:
            if self._outstanding.fetches:
                self._outlet.blame(self._outstanding.fetches[0], error)
            return self._given_up or str(error)
        finally:
            self._is_running = False
            await self._outlet.close()
            self._parts.end()
            self._outstanding.end()
            self._send_queue.end()
            self._stream.close()  # before the next wait: a task that is cancelled again does not come back
            await self._send_queue.close()

    def send(self, request: LaneRequest) -> None:
        """Send `request` now, after posted messages and before all queued requests."""
        self._send_queue.send(*self._outlet.begin(request, is_next=True))

    def forget(self, transfer_id: int) -> None:
        """Stop writing a transfer that has ended."""
        self._outlet.forget(transfer_id)

    def is_writing(self, transfer_id: int) -> bool:
        """Return whether bytes of this transfer are in flight beside the connection.

        The transfer's pages must stay open meanwhile.
        """
        return self._outlet.is_writing(transfer_id)

    def take_outstanding(self) -> list[LaneRequest]:
        """Return, and forget, the requests in flight when the lane was lost."""
        return [*self._outstanding.take_all(), *self._outlet.take_all()]

    def take_closes(self) -> list[Close]:
        """Return, and forget, the `Close` messages that may not have arrived.

        A `Close` has arrived if a later request was answered.
        """
        return self._outstanding.take_closes()

    def give_up(self, reason: str) -> None:
        """End the connection for `reason`."""
        self._given_up = self._given_up or reason
        self._stream.shut_down()

    # -- out --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send all frames that may leave now."""
        self._send_requests()
        if self._send_queue.is_due and self._is_running and not self._send_queue.is_stopped:
            self._send_queue.send()

    def _send_requests(self) -> None:
        """Send requests, together with waiting frames that get no answer.

        If no request is sent, such frames keep waiting.
        """
        if not self._is_running or self._send_queue.is_stopped:
            return
        begun: list[bytes | memoryview] = []
        num_bytes, may_wait = 0, True
        while num_bytes < _SENT_BYTES and (request := self._owner.next_request(self)) is not None:
            pieces = self._outlet.begin(request, is_next=not begun)
            begun += pieces
            may_wait &= _may_wait(request)
            num_bytes += sum(map(len, pieces))
            if not request.moving_bytes:
                num_bytes += self._copied_share(request)
        if begun and may_wait:
            self._send_queue.keep(*map(bytes, begun))
        elif begun:
            self._send_queue.send(*begun)
        if num_bytes >= _SENT_BYTES and self._owner.has_more:
            self._pump_soon()  # others first

    def _pump_soon(self) -> None:
        if not self._is_pumping_soon:
            self._is_pumping_soon = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        if self._outlet.copies and self._owner.should_yield():
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._is_pumping_soon = False
            self._pump()

    def _copied_share(self, request: LaneRequest) -> int:
        """Return how many of the `_SENT_BYTES` of a turn a copied request uses up.

        A latency request uses up the whole turn, so that its caller goes on before more is copied. Bulk uses
        up a whole turn if it has `frame_bytes` bytes, and less in proportion if it has fewer.
        """
        if request.urgency is Urgency.LATENCY:
            return _SENT_BYTES
        return max(1, request.num_bytes * _SENT_BYTES // self._owner.frame_bytes(Urgency.BULK))

    # -- in ---------------------------------------------------------------------------------------

    async def _receive(self) -> NoReturn:
        while True:
            await self._frames.dispatch(self._handle_frames)
            if self._left is not None:
                frame, self._left = self._left, None
                assert isinstance(frame.message, Found)
                self._end_fetch(await self._answers.found(frame.message, frame.payload_bytes))
                self._send_requests()
            if self._stream.num_ahead:
                await self._stream.take_turns()

    def _handle_frames(self) -> bool:
        """Handle the received frames.

        Returns True if the caller must act before more is handled: await the payload of `_left`, or let other
        tasks have a turn.
        """
        while (frame := self._frames.ready()) is not None:
            if not self._take(frame):
                self._left = frame
                break
            if self._stream.is_turn_over and self._stream.num_ahead:
                break
        self._send_requests()  # there may be room for more
        return frame is not None

    def _take(self, frame: Frame) -> bool:
        """Handle one frame. Returns False, without any effect, if its payload must be awaited.

        An exception ends the connection.
        """
        match frame.message:
            case WriteAck() as ack:
                self._answers.acknowledged(ack)
            case Found() as found:
                damaged = self._answers.found_now(found, frame.payload_bytes)
                if damaged is None:
                    return False
                self._end_fetch(damaged)
            case TransferEnded(transfer_id, reason):
                self._owner.ended(transfer_id, reason)
            case Exposed() as exposed:
                self._outlet.exposed(exposed)
            case _:
                raise TransferError(f"{type(frame.message).__name__} came, which is for receivers")
        return True

    def _end_fetch(self, damaged: list[int]) -> None:
        """Tell the peer that the blocks of its oldest answer have been read, and which were damaged."""
        self._send_queue.keep(encode_frame(FetchDone(damaged)) if damaged else _FETCH_DONE)


def _may_wait(request: LaneRequest) -> bool:
    """Return whether the peer may be told of `request` later.

    Waking the peer takes as long as copying a MiB.
    """
    return request.urgency is Urgency.BULK and not request.moving_bytes
