"""Requests of a lane over shared memory that this side completes by copying: writes to granted pages, reads
of blocks that it finds.

The peer is told of a latency write in the call that copies it, of everything else within `NOT_URGENT_S`.

Owns: which requests are copied, what the peer is told of them. Does not know: the queues, turns of the event
loop.
"""

from collections.abc import Callable, Sequence

import msgspec

from messenger.sender.answer_handler import AnswerHandler
from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import FetchRequest, Request, Urgency, WriteOutcome, WriteRequest
from messenger.sender.send_queue import SendQueue
from messenger.shm.catalogue import Catalogue
from messenger.shm.shared_pages import SharedPages
from messenger.transport.stream import Stream
from messenger.wire.protocol import encode_frame


class Copies:
    """The part of one lane that copies. Call `leave` when the lane ends."""

    def __init__(
        self,
        pages: SharedPages | None,
        catalogue: Catalogue | None,
        stream: Stream,
        outstanding: Outstanding,
        answers: AnswerHandler,
        send_queue: SendQueue,
    ) -> None:
        """Copy writes if there are `pages`, and reads if there is a `catalogue`."""
        self.pages = pages
        self._catalogue = catalogue
        self._stream = stream
        self._outstanding = outstanding
        self._answers = answers
        self._send_queue = send_queue
        self.are_possible = pages is not None or catalogue is not None
        self.have_been_read = False
        """Whether any block has been read by copying."""

    def begin(self, request: Request, *, is_next: bool) -> Sequence[bytes | memoryview] | None:
        """Begin `request` and return the bytes to send for it; an empty sequence if there are none.

        Returns None, and nothing has happened, if the request cannot be copied here. `is_next`: only frames
        that the send queue keeps have to leave before it.
        """
        if isinstance(request, WriteRequest) and self.pages is not None and not request.is_placed:
            tells = is_next and request.urgency is Urgency.LATENCY and not self._send_queue.is_stopped
            return self._place(request, self.pages, tells=tells)
        if isinstance(request, FetchRequest) and self._catalogue is not None:
            checksums = self._catalogue.read(request.fetch, request.views)
            if checksums is not None:
                self._read(request, checksums)
                return []
        return None

    def leave(self) -> None:
        """Give the copy slot back to its owner."""
        if self.pages is not None:
            self.pages.leave()

    def _place(
        self, request: WriteRequest, pages: SharedPages, *, tells: bool
    ) -> Sequence[bytes | memoryview]:
        """Write the blocks, unless only the receiver can. With `tells`, tell the receiver in the same
        call."""
        placed = msgspec.structs.replace(request.write, is_placed=True)
        kept = self._send_queue.take_kept() if tells else b""
        frame = kept + encode_frame(placed)
        num_sent = pages.place(placed, request.layer_bytes, self._stream.fileno, frame if tells else b"")
        if num_sent is not None:
            request.write, request.is_placed = placed, True
        self._outstanding.begin(request)
        self._outstanding.sent(request)
        if num_sent is None:
            return [kept + encode_frame(request.write)]
        if tells and num_sent < len(frame):
            self._send_queue.send(frame[num_sent:])  # before anything that is said when it is done
        self._answers.moved(request, received=False)
        request.done(WriteOutcome.PLACED, "")
        return [] if tells else [frame]

    def _read(self, request: FetchRequest, checksums: dict[int, bytes]) -> None:
        """Complete a read: the blocks are in their views. Their holder is told later, for the order of
        eviction."""
        request.is_read = self.have_been_read = True
        self._send_queue.keep(encode_frame(msgspec.structs.replace(request.fetch, is_read=True)))
        self._answers.moved(request, received=True)
        request.done(checksums, None)


def copied_share(request: Request, turn_bytes: int, frame_bytes: Callable[[Urgency], int]) -> int:
    """Return how much of a turn of `turn_bytes` a copied `request` takes.

    A latency request takes the whole turn: its caller goes on before more is copied. Bulk of `frame_bytes`
    makes one turn.
    """
    if request.urgency is Urgency.LATENCY:
        return turn_bytes
    return max(1, request.num_bytes * turn_bytes // frame_bytes(Urgency.BULK))
