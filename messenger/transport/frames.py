"""The frames of a stream, one at a time.

A frame's payload stays on the stream: the caller must take the payload off before it asks for the next frame.

Owns: where one frame ends and the next begins. Does not know: the meaning of frames, the place of payloads.
"""

from collections.abc import Callable

from messenger.transport.stream import Stream
from messenger.wire.protocol import Frame, FrameReader, Side


class Frames:
    """The frames that arrive on one side of a connection.

    Methods raise OSError when the connection ends, TransferError for a peer that does not speak the protocol.
    """

    def __init__(self, stream: Stream, side: Side) -> None:
        self.stream = stream
        self._reader = FrameReader(side)

    async def next(self) -> Frame:
        """Wait for the next frame and return it."""
        while (frame := self.ready()) is None:
            await self.stream.more(lambda: True)
        return frame

    async def dispatch(self, handle: Callable[[], bool]) -> None:
        """Call `handle` whenever another frame may be `ready`, until `handle` returns True.

        With TLS the call also returns when this connection's turn is over.
        """
        if not handle():
            await self.stream.more(handle)

    def ready(self) -> Frame | None:
        """Return the next frame if its head has been received, else None.

        The frame's payload may still be missing.
        """
        stream, reader = self.stream, self._reader
        frame = reader.read(stream.ahead) if stream.num_ahead >= reader.wanted_bytes else None
        if frame is None:
            stream.wanted_bytes = reader.wanted_bytes
        else:
            stream.take(frame.num_bytes)
        return frame
