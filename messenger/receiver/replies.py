"""What is said to a sender over one connection.

Owns: what waits to be sent, and how much of it may. Does not know: what it is.
"""

from messenger.transport.outbox import Outbox
from messenger.transport.stream import Stream

_MOST_WAITING = 1024
"""messages of one connection"""


class Replies:
    """Whoever has them is the connection's only sender."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._outbox = Outbox(stream)

    def post(self, *buffers: bytes | memoryview) -> None:
        """Sends frames. Never waits; if the connection is lost its receiving side finds out."""
        try:
            self._outbox.post(*buffers)
        except OSError:
            self.shut_down()  # the receiving side finds out, and says why
        if len(self._outbox) > _MOST_WAITING:
            self.shut_down()  # a sender that does not read its answers

    def shut_down(self) -> None:
        """The connection is to end."""
        self._stream.shut_down()

    async def close(self) -> None:
        """What waits is not sent."""
        await self._outbox.close()
