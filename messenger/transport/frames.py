"""The frames of a stream, one at a time.

Owns: where one frame ends and the next begins. Does not know: the meaning of frames. The caller, which knows
the place of the payload, must take it off the stream before it asks for the next frame.
"""

from collections.abc import Callable

from messenger.transport.stream import Stream
from messenger.wire.protocol import Frame, FrameReader, Side


class Frames:
    """The frames that arrive on one side of a connection.

    Methods raise ConnectionError when the connection ends, TransferError for a peer that does not speak the
    protocol.
    """

    def __init__(self, stream: Stream, side: Side) -> None:
        self.stream = stream
        self._reader = FrameReader(side)

    async def next(self) -> Frame:
        """Wait for the next frame and return it."""
        while (frame := self.ready()) is None:
            await self.stream.more(lambda: True)
        return frame

    async def heard(self, hear: Callable[[], bool]) -> None:
        """Call `hear` whenever another frame may be `ready`, until `hear` returns True."""
        if not hear():
            await self.stream.more(hear)

    def ready(self) -> Frame | None:
        """Return the next frame if its head has been received, else None. The frame's payload may still be
        missing."""
        stream, reader = self.stream, self._reader
        frame = reader.read(stream.ahead) if stream.num_ahead >= reader.wanted_bytes else None
        if frame is None:
            stream.wanted_bytes = reader.wanted_bytes
        else:
            stream.take(frame.num_bytes)
        return frame
