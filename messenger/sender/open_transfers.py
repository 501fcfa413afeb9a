"""The open transfers of a session, and what the peer is told of them.

A write makes its transfer known to the peer. A transfer that has not written yet is announced after a while,
so that a loss of the session fails the transfer's grant. At its end the peer gets a `Close`.

Owns: the open transfers, these messages. Does not know: requests, which lane sends what.
"""

import asyncio
from collections.abc import Sequence

from messenger.sender.lane import Lane
from messenger.sender.transfer import Transfer
from messenger.wire.messages import Close, brief
from messenger.wire.protocol import NOT_URGENT_S


class OpenTransfers:
    """The open transfers of one session. `lanes` are the session's lanes at any time."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._by_id: dict[int, Transfer] = {}
        self._delayed_closes: dict[int, Close] = {}
        """`Close` messages of ended transfers that still have bytes in flight beside the connections."""
        self._announcement: asyncio.TimerHandle | None = None
        """Timer after which the peer hears of transfers that have not written yet."""

    @property
    def are_any(self) -> bool:
        """Whether a transfer is open."""
        return bool(self._by_id)

    def begun(self, transfer: Transfer) -> None:
        """Record the beginning of a transfer, which is announced to the peer in a while."""
        self._by_id[transfer.opening.transfer_id] = transfer
        if self._announcement is None:
            self._announcement = asyncio.get_running_loop().call_later(NOT_URGENT_S, self._announce)

    def announced(self, transfer_id: int) -> None:
        """Record that a lane has been given a write, which makes the transfer known to the peer."""
        transfer = self._by_id.get(transfer_id)
        if transfer is not None:
            transfer.is_announced = True

    def ended(self, transfer: Transfer, reason: str | None) -> None:
        """Record the end of a transfer. `reason`: why it was given up; None if it is complete."""
        transfer_id = transfer.opening.transfer_id
        self._by_id.pop(transfer_id, None)
        for lane in self._lanes:
            lane.forget(transfer_id)
        if self._lanes and (transfer.is_announced or reason is not None):
            # A peer that does not know the transfer gets its `Open` too: the grant must fail for this reason.
            self._announce_one(transfer)
            self._send_close(Close(transfer_id, None if reason is None else brief(reason)))

    def fail(self, transfer_id: int, reason: str) -> None:
        """Fail a transfer, if it is open."""
        transfer = self._by_id.get(transfer_id)
        if transfer is not None:
            transfer.fail(reason)

    def fail_all(self, reason: str) -> None:
        """Fail all transfers, because no lane is left."""
        self._delayed_closes.clear()
        for transfer in list(self._by_id.values()):
            transfer.fail(reason)

    def lane_lost(self, lane: Lane) -> None:
        """Repeat over another lane what the peer may not have heard over `lane`."""
        for transfer in self._by_id.values():
            self._lanes[0].post(transfer.opening)
        for close in lane.take_closes():
            self._lanes[0].post(close)
        for transfer_id in list(self._delayed_closes):
            self.written(transfer_id)

    def written(self, transfer_id: int) -> None:
        """Record that a write of this transfer is no longer in flight beside a connection."""
        close = self._delayed_closes.pop(transfer_id, None)
        if close is not None:
            self._send_close(close)

    def _send_close(self, close: Close) -> None:
        """Send a `Close` once no byte of the transfer is in flight beside the connections.

        On a `Close` the peer closes its pages. A write to closed pages would break the queue pair for all
        transfers.
        """
        if any(lane.is_writing(close.transfer_id) for lane in self._lanes):
            self._delayed_closes[close.transfer_id] = close
        elif self._lanes:
            self._lanes[0].post(close, may_wait=close.reason is None)

    def _announce(self) -> None:
        """Tell the peer of transfers that have not written yet.

        From then on the loss of the session fails the grants of these transfers.
        """
        self._announcement = None
        for transfer in self._by_id.values():
            self._announce_one(transfer)

    def _announce_one(self, transfer: Transfer) -> None:
        if self._lanes and not transfer.is_announced:
            transfer.is_announced = True
            self._lanes[0].post(transfer.opening)
