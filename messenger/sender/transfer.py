"""Transfers and results, for the callers that wait for them.

Owns: how a transfer fails and ends, the result of a request. Does not know: lanes, queues.
"""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from messenger.sender.requests import LaneRequest, Urgency, WriteOutcome, WriteRequest
from messenger.wire.messages import Open, Write, WriteEntry
from mooncake.errors import TransferError


class TransferOwner(Protocol):
    """The interface of the session to which a transfer belongs."""

    async def submit(self, request: LaneRequest) -> None:
        """Send or queue a request."""

    def transfer_begun(self, transfer: "Transfer") -> None:
        """Record the beginning of a transfer. Raises TransferError if the session has ended."""

    def transfer_ended(self, transfer: "Transfer", reason: str | None) -> None:
        """Record the end of a transfer. `reason`: why it was given up; None if it is complete."""


class Transfer:
    """Writes to one grant, within a `with` statement. A failed write fails the whole transfer."""

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
        self.is_announced = False
        """Whether a lane has been given a message that makes the transfer known to the peer."""
        self._num_unacknowledged = 0
        """Number of writes that this side has copied, and that the peer has not acknowledged."""
        self._owner = owner
        self._urgency = urgency
        self._on_change = on_change
        self._heads = heads

    def __enter__(self) -> Self:
        self._owner.transfer_begun(self)
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
        self._owner.transfer_ended(self, reason)

    def check(self) -> None:
        """Check that the transfer has not failed. Raises TransferError."""
        if self.failure is not None:
            raise TransferError(self.failure)

    async def write(
        self, entries: list[WriteEntry], num_bytes: int, done: Callable[[WriteOutcome], None]
    ) -> None:
        """Submit one frame of writes, waiting while too many requests of its class are pending.

        `done` is called once, when no byte of the source will be read for this frame any more (see
        WriteRequest). The peer may be told only later that the bytes are in its pages. Raises TransferError
        if the transfer has failed; `done` is called then too.
        """

        # `finish` is called once. `acknowledged` follows only if this side has copied the bytes itself.
        def finish(outcome: WriteOutcome, reason: str) -> None:
            if outcome is not WriteOutcome.PLACED:
                self.fail(reason)
            elif request.is_copied:
                self._num_unacknowledged += 1
            done(outcome)
            self._on_change()

        def acknowledged(failure: str | None) -> None:
            self._num_unacknowledged -= 1
            if failure is not None:
                self.fail(failure)
            self._on_change()

        write = Write(self.opening.transfer_id, self.opening.grant_id, entries, self._heads)
        request = WriteRequest(
            write, num_bytes, self._urgency, finish, lambda: self.failure is None, acknowledged
        )
        await self._owner.submit(request)
        self.check()

    @property
    def is_acknowledged(self) -> bool:
        """Whether the peer has acknowledged every write whose `done` was called with PLACED."""
        return not self._num_unacknowledged

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self._on_change()


class RequestResult:
    """The result of a request, for its waiting caller."""

    def __init__(self) -> None:
        self.checksums: dict[int, bytes] = {}
        """Checksums of fetched blocks, by index."""
        self.failure: str | None = None
        self.is_there = asyncio.Event()

    def give(self, checksums: dict[int, bytes], failure: str | None) -> None:
        self.checksums, self.failure = checksums, failure
        self.is_there.set()

    async def settled(self) -> None:
        """Wait for the result.

        Cancellations during the wait are swallowed: the caller is being cancelled already, and raises
        CancelledError itself.
        """
        while not self.is_there.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.is_there.wait()
