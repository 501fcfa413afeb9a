"""Frames off a stream.

Owns: where one frame ends and the next begins. Does not know: what they mean; the payload is taken off the
stream by whoever knows where it belongs, before the next frame is asked for. A small one is there already.
"""

from collections.abc import Callable

from messenger.protocol import Frame, FrameReader, Side
from messenger.stream import AHEAD_BYTES, Stream


class Frames:
    """What arrives on one side of a connection. Raises ConnectionError at its end, TransferError for a peer
    that does not speak the protocol."""

    def __init__(self, stream: Stream, side: Side) -> None:
        self.stream = stream
        self._reader = FrameReader(side)
        self._begun: Frame | None = None
        """of which the payload is awaited"""

    async def next(self) -> Frame:
        """The next frame, as soon as it is there."""
        while (frame := self.ready()) is None:
            await self.stream.more(lambda: True)
        return frame

    async def heard(self, hear: Callable[[], bool]) -> None:
        """Calls `hear` whenever there may be another frame `ready`, until it returns True."""
        if not hear():
            await self.stream.more(hear)

    def ready(self) -> Frame | None:
        """The next frame, if it has been received already: a small one with its payload."""
        stream = self.stream
        frame = self._begun or self._reader.read(stream.ahead)
        if frame is None:
            stream.wanted_bytes = self._reader.wanted_bytes
            return None
        if frame.payload_bytes:
            with_payload = frame.num_bytes + frame.payload_bytes
            if stream.num_ahead < with_payload <= AHEAD_BYTES:
                self._begun, stream.wanted_bytes = frame, with_payload
                return None
        self._begun = None
        stream.take(frame.num_bytes)
        return frame
