"""Messages between two parts of one process in one event loop, neither encoded nor copied.

Owns: the queue of each direction. Does not know: what the messages mean. Between processes:
`mooncake.bus.zeromq`.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class Inbox(Generic[Incoming]):
    """A queue of messages for one reader, at a third of the processor time of `asyncio.Queue`."""

    __slots__ = ("_arrival", "_messages")

    def __init__(self) -> None:
        self._messages: deque[Incoming] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Return the number of unread messages."""
        return len(self._messages)

    def put_nowait(self, message: Incoming) -> None:
        """Append a message without waiting."""
        self._messages.append(message)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def get(self) -> Incoming:
        """Wait for the oldest unread message and return it."""
        while not self._messages:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._messages.popleft()


class InProcessLink(Generic[Outgoing, Incoming]):
    """One end of a link within a process.

    The other end gets the sent object itself, so the sender must not change it any more.
    """

    def __init__(self, outgoing: Inbox[Outgoing], incoming: Inbox[Incoming]) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    async def send(self, message: Outgoing) -> None:
        """Send a message without waiting."""
        self._outgoing.put_nowait(message)

    least_epoch = 0
    """The least epoch that is accepted: 0, as the Conductor in this process is the only one."""

    async def follow(self) -> None:
        """Wait for ever: no other Conductor takes the place of the one in this process."""
        await asyncio.Event().wait()

    @property
    def num_queued(self) -> int:
        """The number of messages that were sent and that the other end has not read."""
        return len(self._outgoing)

    @property
    def num_unread(self) -> int:
        """The number of messages that have arrived and are unread."""
        return len(self._incoming)

    async def recv(self) -> Incoming:
        """Wait for the next message and return it."""
        return await self._incoming.get()
