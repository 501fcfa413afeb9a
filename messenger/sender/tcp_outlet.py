"""The outlet over TCP: a write's bytes follow its frame.

Owns: where the bytes of writes are. Does not know: the connection.
"""

import functools
from collections.abc import Sequence

from messenger.sender.outlet import BulkPace, LaneParts, Opening, Outlet, SendingEnd
from messenger.sender.requests import WriteRequest
from messenger.transport.stream import Stream
from messenger.transport.transports import TcpInlet
from messenger.wire.messages import Welcome
from messenger.wire.protocol import encode_frame


class TcpOutlet(Outlet):
    """The outlet of a lane that sends blocks from `source` after their frames."""

    bulk_pace = BulkPace(512 << 10)

    def __init__(self, lane: LaneParts, source: memoryview) -> None:
        super().__init__(lane)
        self._source = source

    def _write_frame(self, request: WriteRequest) -> Sequence[bytes | memoryview]:
        entries, layer_bytes, source = request.write.entries, request.layer_bytes, self._source
        return [
            encode_frame(request.write, request.num_bytes),
            *(source[e.source_offset : e.source_offset + e.num_layers * layer_bytes] for e in entries),
        ]


class TcpOpening(Opening):
    """The opening of a lane over TCP. It adds nothing to the introduction."""

    def __init__(self, stream: Stream, source: memoryview) -> None:
        self._stream, self._source = stream, source

    async def join(self, welcome: Welcome) -> SendingEnd:
        return SendingEnd(TcpInlet(self._stream), functools.partial(TcpOutlet, source=self._source))
