"""What leaves over a lane: requests, and what is said beside them, in their order.

What has no answer waits a moment for a request to go with: one system call is enough for both.

Owns: what has been said and not been sent, when it must leave, and that the other side takes it. Does not
know: requests, what comes back.
"""

from collections.abc import Callable

from messenger.transport.deadline import Deadline
from messenger.transport.outbox import Outbox
from messenger.transport.stream import Stream
from messenger.wire.protocol import NOT_URGENT_S


def _nothing() -> None:
    """The lane has ended."""


class SendQueue:
    """`pump` is called when more may be sent: what had to wait has left, or what was kept is due. `stuck` is
    when the other side has taken nothing for `timeout_s`."""

    def __init__(
        self, stream: Stream, timeout_s: float, pump: Callable[[], None], stuck: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._pump = pump
        self._kept: list[bytes] = []
        """frames that go before what is sent next"""
        self._waiting = Deadline(NOT_URGENT_S, self._become_due)
        """of what is kept"""
        self.is_due = False
        """else they wait for a request to go with"""
        self._outbox = Outbox(stream, self._all_left)
        self._leaving = Deadline(timeout_s, stuck)
        """of what the other side has not taken yet: to what is said of reads there is no answer"""

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel takes no more for now."""
        return bool(self._outbox)

    def keep(self, *frames: bytes) -> None:
        """They leave with what is sent next, or are due in time."""
        if not self._kept:
            self._waiting.set()
        self._kept += frames

    def take_kept(self) -> bytes:
        """For who sends it first of all himself."""
        kept, self._kept = self._kept, []
        self.is_due = False
        self._waiting.clear()
        return b"".join(kept)

    def send(self, *buffers: bytes | memoryview) -> None:
        """All that is kept, and then these."""
        kept, self._kept = self._kept, []
        self.is_due = False
        self._waiting.clear()
        try:
            self._outbox.post(*kept, *buffers)
        except OSError:
            self._stream.shut_down()  # the receiving side finds out, and says why
        if self._outbox:
            self._leaving.set()

    def end(self) -> None:
        """`pump` and `stuck` are not called any more."""
        self._pump = _nothing
        self._leaving.close()
        self._waiting.close()

    async def close(self) -> None:
        """What waits is not sent."""
        await self._outbox.close()

    def _become_due(self) -> None:
        self.is_due = True
        self._pump()

    def _all_left(self) -> None:
        self._leaving.clear()
        self._pump()
