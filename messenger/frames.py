"""Frames off a stream.

Owns: where one frame ends and the next begins. Does not know: what they mean; the payload is taken off the
stream by whoever knows where it belongs, before the next frame is asked for.
"""

from messenger.protocol import Frame, FrameReader, Side
from messenger.stream import Stream


class Frames:
    """What arrives on one side of a connection. Raises ConnectionError at its end, TransferError for a peer
    that does not speak the protocol."""

    def __init__(self, stream: Stream, side: Side) -> None:
        self.stream = stream
        self._reader = FrameReader(side)
        self._put_back: Frame | None = None

    async def next(self) -> Frame:
        """The next frame, as soon as it is there."""
        while (frame := self.ready()) is None:
            await self.stream.more(self._reader.wanted_bytes)
        return frame

    def ready(self) -> Frame | None:
        """The next frame, if it has been received already."""
        if self._put_back is not None:
            put_back, self._put_back = self._put_back, None
            return put_back
        frame = self._reader.read(self.stream.ahead)
        if frame is not None:
            self.stream.take(frame.num_bytes)
        return frame

    def put_back(self, frame: Frame) -> None:
        """It is the next one again."""
        self._put_back = frame
