"""A small request and its answer in one compiled call, on a lane where nothing else is under way.

What does not go as it mostly does is left to those who do it step by step: what the kernel has not taken is
sent behind, and what has come instead of the answer, or after the time to listen for it, is read as ever.

Owns: when that may be, and what is to be said of it. Does not know: what waits to be sent.
"""

from collections.abc import Callable, Sequence
from functools import partial

from messenger.sender.departures import Departures
from messenger.sender.lingering import LINGERED_BYTES, Lingering
from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import FetchRequest, Outcome, Request, WriteRequest
from messenger.sender.results import Results
from messenger.transport.direct import DirectPlacement, can_expect
from messenger.transport.source import SourceSegment
from messenger.transport.stream import Stream, without
from messenger.transport.transports import Transport
from messenger.wire.messages import FetchDone, WriteAck
from messenger.wire.protocol import encode_frame

_MOST_BYTES = LINGERED_BYTES[Transport.TCP]
FETCH_DONE = encode_frame(FetchDone())


class Exchange:
    """Of one lane, whose bytes are plain."""

    def __init__(
        self,
        direct: DirectPlacement,
        source: SourceSegment,
        stream: Stream,
        outstanding: Outstanding,
        results: Results,
        departures: Departures,
        lingering: Lingering,
    ) -> None:
        """What is written comes from `source`."""
        direct.ask(source, encode_frame(WriteAck()))
        self._direct = direct
        self._source = source.buffer
        self._stream = stream
        self._outstanding = outstanding
        self._results = results
        self._departures = departures
        self._lingering = lingering
        self._patience = lingering.patience

    def is_possible(self, request: Request) -> bool:
        """Whether `request` can be had in one call."""
        if request.num_bytes > _MOST_BYTES or not self._stream.may_listen or self._departures.is_stopped:
            return False
        if self._outstanding.num_begun > self._outstanding.num_answered:
            return False
        if isinstance(request, WriteRequest):
            if request.is_placed or len(request.write.entries) > 1:
                return False
            offset = request.write.entries[0].source_offset
            return 0 <= offset <= len(self._source) - request.num_bytes
        if not isinstance(request, FetchRequest) or len(request.views) > 1:
            return False
        # What nothing is expected for is taken to be a write: an acknowledgement would be its answer.
        return can_expect(request.views[0], request.layer_bytes)

    def begin(self, request: Request, on_late: Callable[[Request], None]) -> bool:
        """Whether `request`, which is possible, is done: it was sent, and its answer has come in time.

        Else it is outstanding from now on: `on_late` is called with it before it can be done.
        """
        if isinstance(request, WriteRequest):
            offset, num_bytes = request.write.entries[0].source_offset, request.num_bytes
            frame = encode_frame(request.write, num_bytes)
        else:
            assert isinstance(request, FetchRequest)
            offset = num_bytes = 0
            frame = encode_frame(request.fetch)
            self._direct.expect(request.views[0], request.layer_bytes)
        frame = self._departures.take_kept() + frame
        num_sent, has_come, until_s = 0, False, self._patience.begin()
        if until_s is not None:
            ask = partial(self._direct.exchange, head=frame, offset=offset, num_bytes=num_bytes)
            has_come = self._stream.listen_with(ask, self._patience.listen_s)
            checksums = self._direct.take_answer() if has_come else None
            if checksums is not None:
                self._patience.end(until_s, is_there=True)
                self._finish(request, checksums)
                return True
            num_sent = self._direct.num_asked
        on_late(request)
        block = self._source[offset : offset + num_bytes]
        self._await(request, [memoryview(frame), block], num_sent)
        if has_come and self._stream.may_poll:
            self._stream.poll()
        if until_s is not None:
            self._patience.end(until_s, is_there=has_come)
            self._lingering.has_listened()
        return False

    def _finish(self, request: WriteRequest | FetchRequest, checksums: bytes) -> None:
        """Its answer was all that has come."""
        self._stream.moved(self._direct.num_asked)
        self._stream.take_listened()
        self._outstanding.passed()
        if isinstance(request, WriteRequest):
            self._results.moved(request, received=False)
            request.done(Outcome.PLACED, "")
        else:
            self._direct.expect(None)
            self._departures.keep(FETCH_DONE)
            self._results.moved(request, received=True)
            request.done({0: checksums}, None)

    def _await(self, request: Request, pieces: Sequence[memoryview], num_sent: int) -> None:
        """Sends the rest."""
        self._outstanding.begin(request)
        self._outstanding.sent(request)
        if isinstance(request, FetchRequest):
            self._results.expect()
        if rest := without(pieces, num_sent):
            self._departures.send(*rest)
