"""Messages that leave over one connection, in order.

Owns: bytes that the kernel has not taken yet. Does not know: the meaning of bytes, sockets.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from messenger.transport.stream import Stream


class Outbox:
    """The outgoing messages of one connection, sent in order.

    Messages that the kernel does not take at once wait here. `on_empty` is called when all waiting messages
    have left. Nothing else may send over the stream.
    """

    def __init__(self, stream: Stream, on_empty: Callable[[], None] = lambda: None) -> None:
        self._stream = stream
        self._on_empty = on_empty
        self._waiting: deque[Sequence[memoryview]] = deque()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of waiting messages."""
        return len(self._waiting)

    def post(self, *buffers: bytes | memoryview) -> None:
        """Send a message without waiting. Raises OSError when the connection is lost."""
        rest: Sequence[memoryview] = [memoryview(buffer) for buffer in buffers]
        if not self._waiting:
            rest = self._stream.send_now(rest)
            if not rest:
                return
        self._waiting.append(rest)
        if self._task is None:
            self._task = asyncio.create_task(self._flush())

    async def close(self) -> None:
        """Stop sending, and drop waiting messages."""
        self._on_empty = lambda: None  # without this cycle the owner and its mappings are freed at once
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _flush(self) -> None:
        try:
            while self._waiting:
                await self._stream.send(self._waiting[0])
                self._waiting.popleft()
        except OSError:
            self._stream.shut_down()  # the receiving task notices, and logs the reason
            return
        self._task = None
        self._on_empty()
