"""The outlet of a lane: how the bytes of requests reach the peer, behind the lane's frames or beside them.

An outlet is for sending what an inlet (`messenger.transport.transports`) is for receiving. Each transport has
its own, and an opening that agrees with the peer on both in the handshake.

Owns: what is the same over all transports. Does not know: the queues, other lanes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from messenger.rdma.errors import Remedy
from messenger.sender.answer_handler import AnswerHandler
from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import FetchRequest, ProbeRequest, Request, WriteRequest
from messenger.sender.send_queue import SendQueue
from messenger.transport.handshake import OfferedSegment
from messenger.transport.stream import Stream
from messenger.transport.transports import Inlet
from messenger.wire.messages import Exposed, Message, Probe, Welcome
from messenger.wire.protocol import encode_frame
from messenger.wire.rdma_info import EndpointInfo
from mooncake.errors import TransferError


class BulkPace(NamedTuple):
    """Most bulk in flight on a lane while latency requests are expected, as a latency request waits behind
    it."""

    piece_bytes: int
    num_writes: int = 2
    """Pieces of writes in flight."""
    num_fetches: int = 2
    """Pieces of fetches in flight."""


def _nothing(*_: object) -> None:
    """Do nothing: the lane has ended."""


@dataclass(slots=True)
class LaneParts:
    """The parts of a lane that its outlet uses."""

    stream: Stream
    outstanding: Outstanding
    answers: AnswerHandler
    send_queue: SendQueue
    answer_timeout_s: float
    post: Callable[[Message], None]
    """Sends a message that has no answer."""
    pump: Callable[[], None]
    """Sends requests for which there is room now."""
    give_up: Callable[[str], None]
    """Ends the lane for this reason."""
    written: Callable[[int], None]
    """Called when a write of this transfer is no longer in flight beside the connection."""

    def end(self) -> None:
        """Drop the callbacks, so that no reference cycle is left."""
        self.post = self.pump = self.give_up = self.written = _nothing


class Outlet:
    """An outlet whose writes are frames alone: the receiver gets the bytes by itself."""

    bulk_pace: ClassVar[BulkPace]
    copies: bool = False
    """Whether this side may move bytes by itself, at once. Then bulk gets turns of its own, so that other
    tasks run in between."""
    has_read: bool = False
    """Whether a fetch was completed so, without an answer."""
    refused: Request | None = None
    """A request that the transport cannot carry, and that would fail again if it were retried."""
    remedy: Remedy | None = None
    """Remedy for the failure that has ended the lane, if it was one of RDMA."""

    def __init__(self, lane: LaneParts) -> None:
        self._lane = lane

    def begin(self, request: Request, *, is_next: bool) -> Sequence[bytes | memoryview]:
        """Mark `request` as in flight and return the bytes to send for it; none if there are none yet.

        `is_next`: only frames that the send queue keeps leave before them.
        """
        self._lane.outstanding.begin(request)
        self._lane.outstanding.sent(request)
        match request:
            case WriteRequest():
                return self._write_frame(request)
            case FetchRequest():
                return [encode_frame(request.fetch)]
            case ProbeRequest():
                return [encode_frame(Probe(), len(request.payload)), request.payload]

    def _write_frame(self, request: WriteRequest) -> Sequence[bytes | memoryview]:
        return [encode_frame(request.write)]

    def exposed(self, answer: Exposed) -> None:
        """Record which pages the peer has opened. Raises TransferError if it was not asked to open any."""
        raise TransferError(f"{type(answer).__name__} came without RDMA")

    def blame(self, request: Request, error: BaseException | None) -> None:
        """Record that the lane ends with this error, which came of `request`."""

    def is_writing(self, transfer_id: int) -> bool:
        """Return whether bytes of this transfer are in flight beside the connection: the peer's pages must
        stay open for them."""
        return False

    def forget(self, transfer_id: int) -> None:
        """Stop writing a transfer that has ended."""

    async def close(self) -> None:
        """Stop, and wait until no byte moves any more. `take_all` then returns the requests in flight."""

    def take_all(self) -> Sequence[Request]:
        """Take the requests whose bytes were in flight beside the connection."""
        return []


class LaneEnds(NamedTuple):
    """The ends of a lane whose handshake is complete."""

    inlet: Inlet
    make_outlet: Callable[[LaneParts], Outlet]


class Opening:
    """The part of a transport in the handshake of one lane. `close` it if no lane comes of it."""

    segment: OfferedSegment | None = None
    """This side's segment, for the peer to map."""
    endpoint: EndpointInfo | None = None
    """This side's queue pair, for the peer to connect to."""
    takes_copy_slot: bool = False

    async def join(self, welcome: Welcome) -> LaneEnds:
        """Take up what the peer offers in its answer. Raises TransferError."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what was offered."""
