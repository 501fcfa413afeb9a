"""What this side of a lane copies itself, over shared memory: writes to granted pages, blocks that it finds.

The other side is told: of what somebody waits for in the call that copies it, of the rest in time.

Owns: which requests are copied, what is said of them. Does not know: what waits, when it has its turn.
"""

from collections.abc import Callable, Sequence

import msgspec

from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import FetchRequest, Request, Urgency, WriteOutcome, WriteRequest
from messenger.sender.results import Results
from messenger.sender.send_queue import SendQueue
from messenger.shm.catalogue import Catalogue
from messenger.shm.shared_pages import SharedPages
from messenger.transport.stream import Stream
from messenger.wire.protocol import encode_frame


class Copies:
    """Of one lane. `leave` it when that ends."""

    def __init__(
        self,
        pages: SharedPages | None,
        catalogue: Catalogue | None,
        stream: Stream,
        outstanding: Outstanding,
        results: Results,
        send_queue: SendQueue,
    ) -> None:
        """Without `pages` nothing is written, without `catalogue` nothing is read."""
        self.pages = pages
        self._catalogue = catalogue
        self._stream = stream
        self._outstanding = outstanding
        self._results = results
        self._send_queue = send_queue
        self.are_possible = pages is not None or catalogue is not None
        self.have_been_read = False
        """some"""

    def begin(self, request: Request, *, is_next: bool) -> Sequence[bytes | memoryview] | None:
        """What is still to be sent for `request`, which is outstanding from now on, or through; None, and
        nothing has happened, if it cannot be copied here. `is_next`: only what is kept has to leave before.
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
        """The slot is the owner's to give again."""
        if self.pages is not None:
            self.pages.leave()

    def _place(
        self, request: WriteRequest, pages: SharedPages, *, tells: bool
    ) -> Sequence[bytes | memoryview]:
        """Writes it, unless that is the receiver's to do, and `tells` the receiver in the same call."""
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
        self._results.moved(request, received=False)
        request.done(WriteOutcome.PLACED, "")
        return [] if tells else [frame]

    def _read(self, request: FetchRequest, checksums: dict[int, bytes]) -> None:
        """The blocks are there. Their holder is told in time: they have been of use."""
        request.is_read = self.have_been_read = True
        self._send_queue.keep(encode_frame(msgspec.structs.replace(request.fetch, is_read=True)))
        self._results.moved(request, received=True)
        request.done(checksums, None)


def copied_share(request: Request, turn_bytes: int, frame_bytes: Callable[[Urgency], int]) -> int:
    """What `request`, whose bytes have been copied, is of a turn: all of it if somebody waits, who goes on
    before others are copied. Of bulk `frame_bytes` are one turn."""
    if request.urgency is Urgency.LATENCY:
        return turn_bytes
    return max(1, request.num_bytes * turn_bytes // frame_bytes(Urgency.BULK))
