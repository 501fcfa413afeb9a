"""Answers that arrive over a lane. Each completes its request.

Owns: which answers may arrive, where the bytes of fetched blocks go. Does not know: the connection, sending.
"""

from collections.abc import Sequence
from typing import Protocol

from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import LaneRequest, ProbeRequest, WriteOutcome
from messenger.transport.transports import Inlet, Transport
from messenger.wire.messages import Found, RefusalKind, WriteAck
from mooncake.errors import TransferError


class AnswerListener(Protocol):
    """The interface of the session with a peer, for the answers of its lanes."""

    name: str
    """The name of the peer."""

    def moved(self, transport: Transport, num_bytes: int, *, received: bool) -> None:
        """Count bytes that have been placed and verified: on this side if `received`, else at the peer."""

    def damaged(self) -> None:
        """Count an answer with blocks that did not match their checksums."""


class AnswerHandler:
    """The handler of a lane's answers, which complete the requests in `outstanding`.

    An answer that fits no request raises TransferError, which ends the connection.
    """

    def __init__(self, outstanding: Outstanding, inlet: Inlet, listener: AnswerListener) -> None:
        self._outstanding = outstanding
        self._inlet = inlet
        self._listener = listener

    def acknowledged(self, ack: WriteAck) -> None:
        """Complete the oldest write with its acknowledgement."""
        if not self._outstanding.writes:
            raise TransferError("an acknowledgement came for no write")
        request = self._outstanding.take_write()
        refused = None if ack.refusal is None else f"{self._listener.name} refused a write: {ack.message}"
        if isinstance(request, ProbeRequest):
            request.done(None)
        elif request.is_copied:
            request.acknowledged(refused)
        elif refused is None:
            self.moved(request, received=False)
            request.done(WriteOutcome.PLACED, "")
        else:
            is_corrupt = ack.refusal is RefusalKind.CORRUPT
            request.done(WriteOutcome.CORRUPT if is_corrupt else WriteOutcome.FAILED, refused)

    def found_now(self, found: Found, payload_bytes: int) -> list[int] | None:
        """Complete the oldest fetch, and return the indices of its damaged blocks.

        Returns None, without any effect, if the payload must be awaited.
        """
        views = self._views_of(found, payload_bytes)
        checksums = self._inlet.fill_now(found.blocks, views, self._outstanding.fetches[0].layer_bytes)
        if checksums is None:
            return None
        return self._found(found, views, checksums)

    async def found(self, found: Found, payload_bytes: int) -> list[int]:
        """Complete the oldest fetch when its whole payload has arrived.

        Returns the indices of damaged blocks. Raises OSError or TransferError.
        """
        views = self._views_of(found, payload_bytes)
        layer_bytes = self._outstanding.fetches[0].layer_bytes
        return self._found(found, views, await self._inlet.fill(found.blocks, views, layer_bytes))

    def moved(self, request: LaneRequest, *, received: bool) -> None:
        """Count all bytes of a request as moved."""
        self._listener.moved(self._inlet.transport, request.num_bytes, received=received)

    def _views_of(self, found: Found, payload_bytes: int) -> list[memoryview]:
        """Return the views of the found blocks."""
        if not self._outstanding.fetches:
            raise TransferError("blocks came that nobody has asked for")
        wanted = self._outstanding.fetches[0].views
        indices = [block.index for block in found.blocks]
        if any(not 0 <= index < len(wanted) for index in indices) or len(set(indices)) < len(indices):
            raise TransferError(f"blocks {indices} came of {len(wanted)} that were asked for")
        views = [wanted[index] for index in indices]
        self._inlet.check(sum(map(len, views)), payload_bytes)
        return views

    def _found(self, found: Found, views: Sequence[memoryview], checksums: Sequence[bytes]) -> list[int]:
        intact = {
            block.index: actual
            for block, actual in zip(found.blocks, checksums, strict=True)
            if block.checksums == actual
        }
        request = self._outstanding.take_fetch()
        damaged = [block.index for block in found.blocks if block.index not in intact]
        if damaged:
            self._listener.damaged()
        self._listener.moved(self._inlet.transport, sum(map(len, views)), received=True)
        failure = found.failure
        request.done(intact, failure and f"{self._listener.name} cannot send: {failure}")
        return damaged
