"""The outlet of a lane over shared memory: this side completes requests by copying blocks itself.

The blocks of a write are copied into granted pages, and the blocks of a read out of the peer's pages. Where
this side cannot copy, the receiver copies. The peer gets a message about each request: for a latency write in
the call that copies, for all other requests within `NOT_URGENT_S`.

Owns: which requests are copied, what the peer is told of them. Does not know: the queues, turns of the event
loop.
"""

import functools
from collections.abc import Sequence

import msgspec

from messenger.sender.outlet import BulkPace, LaneParts, Opening, Outlet, SendingEnd
from messenger.sender.requests import FetchRequest, LaneRequest, Urgency, WriteOutcome, WriteRequest
from messenger.shm.catalogue import Catalogue
from messenger.shm.copy_table import native
from messenger.shm.shared_pages import SharedPages
from messenger.transport.source import SourceSegment
from messenger.transport.stream import Stream
from messenger.transport.transports import ShmInlet
from messenger.wire.messages import Introduction, Welcome
from messenger.wire.protocol import encode_frame


class ShmOutlet(Outlet):
    """The outlet of a lane to a peer on the same host, whose segment this side has mapped."""

    bulk_pace = BulkPace(1 << 20, num_fetches=1)
    """The limit of bulk in flight: pieces of 1 MiB, and only one fetch.

    This side copies the blocks of a fetch itself, and asks for nothing else meanwhile.
    """

    def __init__(self, lane: LaneParts, pages: SharedPages | None, catalogue: Catalogue | None) -> None:
        """Prepare copies of writes if there are `pages`, and of reads if there is a `catalogue`."""
        super().__init__(lane)
        self.pages, self._catalogue = pages, catalogue
        self.copies = pages is not None or catalogue is not None

    def begin(self, request: LaneRequest, *, is_next: bool) -> Sequence[bytes | memoryview]:
        if isinstance(request, WriteRequest) and self.pages is not None and not request.is_copied:
            tells = is_next and request.urgency is Urgency.LATENCY and not self._lane.send_queue.is_stopped
            return self._place(request, self.pages, tells=tells)
        if isinstance(request, FetchRequest) and self._catalogue is not None:
            checksums = self._catalogue.read(request.fetch, request.views)
            if checksums is not None:
                self._read(request, checksums)
                return []
        return super().begin(request, is_next=is_next)

    async def close(self) -> None:
        """Return the copy slot to its owner."""
        if self.pages is not None:
            self.pages.leave()

    def _place(
        self, request: WriteRequest, pages: SharedPages, *, tells: bool
    ) -> Sequence[bytes | memoryview]:
        """Copy the blocks into the pages, and return the frames to send.

        Nothing is copied if only the receiver can copy. With `tells`, the receiver is told in the same call.
        """
        placed = msgspec.structs.replace(request.write, is_placed=True)
        kept = self._lane.send_queue.take_kept() if tells else b""
        frame = kept + encode_frame(placed)
        num_sent = pages.place(placed, request.layer_bytes, self._lane.stream.fileno, frame if tells else b"")
        if num_sent is not None:
            request.write, request.is_copied = placed, True
        self._lane.outstanding.begin(request)
        self._lane.outstanding.sent(request)
        if num_sent is None:
            return [kept + encode_frame(request.write)]
        if tells and num_sent < len(frame):
            self._lane.send_queue.send(frame[num_sent:])  # before any message that `done` causes
        self._lane.answers.moved(request, received=False)
        request.done(WriteOutcome.PLACED, "")
        return [] if tells else [frame]

    def _read(self, request: FetchRequest, checksums: dict[int, bytes]) -> None:
        """Complete a read whose blocks are in their views.

        The peer is told of the read later, as reads count for its order of eviction.
        """
        request.is_read = self.has_read = True
        self._lane.send_queue.keep(encode_frame(msgspec.structs.replace(request.fetch, is_read=True)))
        self._lane.answers.moved(request, received=True)
        request.done(checksums, None)


class ShmOpening(Opening):
    """The opening of a lane between two segments on one host."""

    def __init__(self, stream: Stream, source: SourceSegment, heads: range) -> None:
        """Offer `source`, whose layers have these heads of the model."""
        self._stream, self._source, self._heads = stream, source, heads
        self.fd = source.read_only_fd

    def introduction(self, introduction: Introduction) -> Introduction:
        return msgspec.structs.replace(
            introduction, segment_bytes=len(self._source.buffer), takes_copy_slot=native() is not None
        )

    async def join(self, welcome: Welcome) -> SendingEnd:
        layout, slot = welcome.identity.layout, welcome.slot
        inlet = ShmInlet(
            self._stream, self._stream.take_fd(), welcome.segment_bytes, is_writable=slot is not None
        )
        pages = catalogue = None
        # With other heads a fetch must name the wanted heads, and a catalogue reads whole layers only.
        if welcome.page_table is not None and layout.heads == self._heads:
            catalogue = Catalogue.at(inlet.segment, welcome.page_table, layout)
        if slot is not None:
            pages = SharedPages(inlet.segment, slot, layout, self._source.buffer)
        return SendingEnd(inlet, functools.partial(ShmOutlet, pages=pages, catalogue=catalogue))
