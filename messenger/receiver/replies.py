"""Replies to a sender over one connection.

Owns: waiting replies, and their limit. Does not know: their content.
"""

from messenger.transport.outbox import Outbox
from messenger.transport.stream import Stream

_MOST_WAITING = 1024
"""The most waiting messages of one connection."""


class Replies:
    """The replies over an accepted connection. Nothing else may send over the connection."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._outbox = Outbox(stream)

    def post(self, *buffers: bytes | memoryview) -> None:
        """Send frames without waiting. The receiving task notices a lost connection."""
        try:
            self._outbox.post(*buffers)
        except OSError:
            self.shut_down()  # the receiving task notices, and logs the reason
        if len(self._outbox) > _MOST_WAITING:
            self.shut_down()  # a sender that does not read its answers

    def shut_down(self) -> None:
        """End the connection."""
        self._stream.shut_down()

    async def close(self) -> None:
        """Stop sending, and drop waiting replies."""
        await self._outbox.close()
