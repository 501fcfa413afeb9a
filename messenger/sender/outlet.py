"""The outlet of a lane: how the bytes of requests reach the peer, after the lane's frames or beside them.

An outlet is the sending counterpart of an inlet (`messenger.transport.transports`). Each transport has its
own outlet, inlet and opening. An opening takes part in the handshake, and makes outlet and inlet from the
peer's answer.

Owns: what is the same over all transports. Does not know: the queues, other lanes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from messenger.sender.answer_handler import AnswerHandler
from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import FetchRequest, LaneRequest, ProbeRequest, WriteRequest
from messenger.sender.send_queue import SendQueue
from messenger.transport.stream import Stream
from messenger.transport.transports import Inlet, Remedy
from messenger.wire.messages import Exposed, Introduction, Message, Probe, Welcome
from messenger.wire.protocol import encode_frame
from mooncake.errors import TransferError


class BulkPace(NamedTuple):
    """The limit of bulk in flight on one lane while latency requests are expected.

    The limit is small because a latency request must wait behind bulk that is in flight on its lane. Writes
    are limited to `piece_bytes * num_writes` bytes, fetches to `piece_bytes * num_fetches` bytes.
    """

    piece_bytes: int
    num_writes: int = 2
    """The most pieces of writes in flight."""
    num_fetches: int = 2
    """The most pieces of fetches in flight."""


def _nothing(*_: object) -> None:
    """Do nothing, as the lane has ended."""


@dataclass(slots=True)
class LaneParts:
    """The parts of a lane that its outlet uses."""

    stream: Stream
    outstanding: Outstanding
    answers: AnswerHandler
    send_queue: SendQueue
    answer_timeout_s: float
    post: Callable[[Message], None]
    """A function that sends a message without an answer."""
    pump: Callable[[], None]
    """A function that sends the requests for which there is room now."""
    give_up: Callable[[str], None]
    """A function that ends the lane for a reason."""
    written: Callable[[int], None]
    """A callback for a write that is no longer in flight beside the connection.

    The argument is the id of the write's transfer.
    """

    def end(self) -> None:
        """Drop the callbacks, so that no reference cycle is left."""
        self.post = self.pump = self.give_up = self.written = _nothing


class Outlet:
    """Base class of outlets.

    By default a write is only a frame, and the receiver gets the bytes by itself.
    """

    bulk_pace: ClassVar[BulkPace]
    copies: bool = False
    """Whether this side may move bytes itself, at once.

    Bulk then gets turns of its own, so that other tasks run in between.
    """
    has_read: bool = False
    """Whether a fetch was completed by this side's copy, without an answer."""
    refused: LaneRequest | None = None
    """The request that the transport cannot carry, and that would fail again; None if there is none."""
    remedy: Remedy | None = None
    """The remedy for the failure that ended the lane; None if the transport knows none."""

    def __init__(self, lane: LaneParts) -> None:
        self._lane = lane

    def begin(self, request: LaneRequest, *, is_next: bool) -> Sequence[bytes | memoryview]:
        """Mark `request` as in flight, and return the bytes to send for it; empty if there are none yet.

        `is_next`: whether these bytes leave before all other bytes, except kept frames of the send queue.
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
        """Record the pages that the peer has opened.

        Raises TransferError if this side has not asked for them.
        """
        raise TransferError(f"{type(answer).__name__} came, and no pages were to be opened")

    def blame(self, request: LaneRequest, error: BaseException | None) -> None:
        """Record that the lane ends with this error, caused by `request`."""

    def is_writing(self, transfer_id: int) -> bool:
        """Return whether bytes of this transfer are in flight beside the connection.

        The peer's pages must stay open meanwhile.
        """
        return False

    def forget(self, transfer_id: int) -> None:
        """Stop writing a transfer that has ended."""

    async def close(self) -> None:
        """Stop, and wait until no byte moves any more.

        Afterwards `take_all` returns the requests in flight.
        """

    def take_all(self) -> Sequence[LaneRequest]:
        """Return, and forget, the requests whose bytes were in flight beside the connection."""
        return []


class SendingEnd(NamedTuple):
    """The sending end of a lane whose handshake is complete.

    It is an inlet, and the function that makes the lane's outlet.
    """

    inlet: Inlet
    make_outlet: Callable[[LaneParts], Outlet]


class Opening:
    """The part of a transport in the handshake of one lane. The caller closes it if no lane is made of it."""

    fd: int | None = None
    """The descriptor that is passed with the introduction."""

    def introduction(self, introduction: Introduction) -> Introduction:
        """Return `introduction` with the transport's own offers added."""
        return introduction

    async def join(self, welcome: Welcome) -> SendingEnd:
        """Return the sending end of the lane, made with the peer's answer.

        Raises TransferError, for example if the welcome lacks the transport's part: a peer that does not know
        the transport has ignored the offer, and has opened a lane over TCP.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free the offered resources."""
