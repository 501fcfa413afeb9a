"""The queue of frames that leave over a lane, in order.

A frame without an answer waits a moment for a request, so that one system call sends both.

Owns: unsent frames, when they must leave, the deadline by which the peer must take them. Does not know:
requests, answers.
"""

from collections.abc import Callable

from messenger.transport.deadline import Deadline
from messenger.transport.outbox import Outbox
from messenger.transport.stream import Stream
from messenger.wire.protocol import NOT_URGENT_S


def _nothing() -> None:
    """Do nothing, as the lane has ended."""


class SendQueue:
    """The send queue of one lane.

    `pump` is called when more may be sent: all waiting bytes have left, or a kept frame is due. `stuck` is
    called when the peer has taken nothing for `timeout_s` seconds.
    """

    def __init__(
        self, stream: Stream, timeout_s: float, pump: Callable[[], None], stuck: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._pump = pump
        self._kept: list[bytes] = []
        """Frames that wait for the next sent frames, and leave ahead of them."""
        self._waiting = Deadline(NOT_URGENT_S, self._become_due)
        """Deadline of the oldest kept frame."""
        self.is_due = False
        """Whether the kept frames must leave now, without waiting for a request to leave with."""
        self._outbox = Outbox(stream, self._all_left)
        self._leaving = Deadline(timeout_s, stuck)
        """Deadline by which the peer must take the bytes that are being sent.

        Deadlines of answers do not suffice, as messages about reads have no answer.
        """

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel takes no more bytes for now."""
        return bool(self._outbox)

    def keep(self, *frames: bytes) -> None:
        """Keep frames, which leave with the next sent frames, or when they are due."""
        if not self._kept:
            self._waiting.set()
        self._kept += frames

    def take_kept(self) -> bytes:
        """Remove and return the kept frames, for a caller that sends them itself."""
        kept, self._kept = self._kept, []
        self.is_due = False
        self._waiting.clear()
        return b"".join(kept)

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send all kept frames, and then `buffers`."""
        kept, self._kept = self._kept, []
        self.is_due = False
        self._waiting.clear()
        try:
            self._outbox.post(*kept, *buffers)
        except OSError:
            self._stream.shut_down()  # the receiving task notices, and logs the reason
        if self._outbox:
            self._leaving.set()

    def end(self) -> None:
        """Stop calling `pump` and `stuck`."""
        self._pump = _nothing
        self._leaving.close()
        self._waiting.close()

    async def close(self) -> None:
        """Stop sending, and drop waiting frames."""
        await self._outbox.close()

    def _become_due(self) -> None:
        self.is_due = True
        self._pump()

    def _all_left(self) -> None:
        self._leaving.clear()
        self._pump()
