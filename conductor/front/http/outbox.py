"""Writes that wait for each other: those of all streams that one message brings something, made in a row.

A write is a call to the system, which leaves little of the next stream's work in the processor's caches.

Owns: what a connection has written and its socket has not got, and until when. Does not know: what it is.
"""

import asyncio
from types import TracebackType


class Outbox:
    """Of one event loop. Within `with`, where nothing may wait, what is written is kept; then it leaves."""

    __slots__ = ("_writers", "is_keeping")

    def __init__(self) -> None:
        self.is_keeping = False
        self._writers: list[Writer] = []

    def __enter__(self) -> None:
        self.is_keeping = True

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.is_keeping = False
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.flush()

    def add(self, writer: "Writer") -> None:
        """It has something that is to leave with the rest."""
        self._writers.append(writer)


class Writer:
    """What an answer uses of its connection's transport. What is kept is written as one piece."""

    __slots__ = ("_kept", "_outbox", "_transport")

    def __init__(self, transport: asyncio.Transport, outbox: Outbox) -> None:
        self._transport, self._outbox = transport, outbox
        self._kept: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Behind all that was written before."""
        if not self._outbox.is_keeping:
            self._transport.write(data)
            return
        if not self._kept:
            self._outbox.add(self)
        self._kept.append(data)

    def flush(self) -> None:
        """What is kept leaves now, if anybody is there."""
        if self._kept:
            kept, self._kept = self._kept, []
            if not self._transport.is_closing():
                self._transport.write(b"".join(kept))

    def close(self) -> None:
        """When all has left."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
