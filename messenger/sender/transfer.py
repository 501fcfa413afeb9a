"""Whoever waits for what was asked of another messenger: a transfer's writer, the caller of a fetch.

Owns: how a transfer fails and ends, what became of a request. Does not know: lanes, queues.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from messenger.sender.requests import Request, Urgency, WriteOutcome, WriteRequest
from messenger.wire.messages import Open, Write, WriteEntry
from mooncake.errors import TransferError


class TransferOwner(Protocol):
    """The peer that it is a transfer to."""

    async def submit(self, request: Request) -> None:
        """Queues a request."""

    def begun(self, transfer: "Transfer") -> None:
        """Raises TransferError if it cannot be."""

    def left(self, transfer: "Transfer", reason: str | None) -> None:
        """It is given up for `reason`, or done."""


class Transfer:
    """Writes to one grant, within its `with` statement. Fails as a whole and for good."""

    def __init__(
        self,
        owner: TransferOwner,
        opening: Open,
        urgency: Urgency,
        on_change: Callable[[], None],
        heads: tuple[int, int] | None,
    ) -> None:
        self.opening = opening
        self.failure: str | None = None
        self.is_known = False
        """to the peer"""
        self._num_unconfirmed = 0
        """writes that are in their pages, but which the peer may not have heard of"""
        self._owner = owner
        self._urgency = urgency
        self._on_change = on_change
        self._heads = heads

    def __enter__(self) -> Self:
        self._owner.begun(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        reason = None
        if isinstance(error, TransferError):
            reason = str(error)
        elif isinstance(error, asyncio.CancelledError):
            reason = "cancelled by its worker"
        elif error is not None:
            reason = "the sender has stopped"
        self.failure = self.failure or reason
        self._owner.left(self, reason)

    def check(self) -> None:
        """Raises TransferError once this transfer has failed."""
        if self.failure is not None:
            raise TransferError(self.failure)

    async def write(
        self, entries: list[WriteEntry], num_bytes: int, done: Callable[[WriteOutcome], None]
    ) -> None:
        """Submits one frame, waiting while too many of its class wait already.

        `done` is called once, when no byte of the source will be read for this frame any more (see
        WriteRequest): it may be when the bytes are there, but the peer has not heard of it yet. Raises
        TransferError if the transfer has failed; `done` was called then too.
        """

        def finish(outcome: WriteOutcome, reason: str) -> None:
            if outcome is not WriteOutcome.PLACED:
                self.fail(reason)
            elif request.is_placed:
                self._num_unconfirmed += 1
            done(outcome)
            self._on_change()

        def confirmed(failure: str | None) -> None:
            self._num_unconfirmed -= 1
            if failure is not None:
                self.fail(failure)
            self._on_change()

        write = Write(self.opening.transfer_id, self.opening.grant_id, entries, self._heads)
        request = WriteRequest(
            write, num_bytes, self._urgency, finish, lambda: self.failure is None, confirmed
        )
        await self._owner.submit(request)
        self.check()

    @property
    def is_confirmed(self) -> bool:
        """Whether the peer has said of all that was placed that it knows."""
        return not self._num_unconfirmed

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self._on_change()


class Answer:
    """What became of a request, for whoever waits for it."""

    def __init__(self) -> None:
        self.checksums: dict[int, bytes] = {}
        """of blocks that have been fetched"""
        self.failure: str | None = None
        self.is_there = asyncio.Event()

    def give(self, checksums: dict[int, bytes], failure: str | None) -> None:
        self.checksums, self.failure = checksums, failure
        self.is_there.set()

    async def settled(self) -> None:
        """However often the waiter is cancelled meanwhile."""
        while not self.is_there.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.is_there.wait()
