"""The session with a sender, on the receiving side: its lanes and its open transfers.

The session ends with the last of its lanes.

Owns: which transfers are open. Does not know: connections, whose pages these are.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from messenger.receiver.served_pool import WriteRefused, WriteTarget
from messenger.wire.messages import Message, TransferEnded, brief
from messenger.wire.protocol import encode_frame
from mooncake.errors import TransferError

log = logging.getLogger(__name__)

MOST_TRANSFERS = 4096
"""The most open transfers of one session."""
_MOST_GIVEN_UP = 1024
"""The most given up transfers that are remembered, so that late writes to them are refused."""


class SessionLane(Protocol):
    """A connection of a session, as the session sees it."""

    ended: asyncio.Event
    """The event that is set when no more bytes of this lane will be placed."""
    awaited: "SessionLane | None"
    """The lane whose end this lane awaits; None if this lane awaits no lane."""

    def shut_down(self) -> None:
        """End the connection."""

    def post(self, *buffers: bytes | memoryview) -> None:
        """Send frames without waiting."""

    def conceal(self, transfer_id: int) -> None:
        """Close the pages of this transfer that are open to the sender."""

    def conceal_in_time(self, transfer_id: int) -> None:
        """Close the pages of this transfer that are open to the sender, but leave the sender time to stop.

        The pages are closed when the sender has closed the transfer, or after `ack_timeout_s` seconds.
        """


@dataclass(slots=True, eq=False)
class IncomingSession:
    """All lanes of one sender.

    Grants know the session as a `GrantWriter`, and tell the session when the sender must stop.
    """

    name: str
    target: WriteTarget
    lanes: dict[int, "SessionLane"] = field(default_factory=dict)
    grants: dict[int, int] = field(default_factory=dict)
    """The grant of each open transfer."""
    lets_place: bool = False
    """Whether the sender may place bytes by itself over some lane.

    A write that was placed over such a lane may be announced on a lane over which the sender may place
    nothing.
    """
    given_up: dict[int, None] = field(default_factory=dict)
    """The latest transfers that were given up. A late write does not open them again."""

    def open(self, transfer_id: int, grant_id: int, ref_text: str) -> None:
        try:
            self.ensure_open(transfer_id, grant_id)
        except WriteRefused as error:
            log.info("transfer %.200r of %s refused: %s", ref_text, self.name, error)
            self.post(TransferEnded(transfer_id, brief(str(error))))

    def ensure_open(self, transfer_id: int, grant_id: int) -> None:
        """Open a transfer unless it is open, as a write may arrive before its `Open`.

        Raises WriteRefused. Raises TransferError if the transfer is open for another grant: that grant would
        not learn of the transfer's end.
        """
        opened = self.grants.get(transfer_id)
        if opened is None:
            if transfer_id in self.given_up:
                raise WriteRefused("the transfer was given up")
            if len(self.grants) >= MOST_TRANSFERS:
                raise WriteRefused(f"{self.name} has {MOST_TRANSFERS} transfers open already")
            self.target.add_writer(grant_id, self)
            self.grants[transfer_id] = grant_id
        elif opened != grant_id:
            raise TransferError(f"transfer {transfer_id} is open for grant {opened}, it names {grant_id}")

    def close(self, transfer_id: int, reason: str | None) -> None:
        """Close a transfer that the sender has completed or given up: none of its bytes is in flight.

        `reason`: why the sender gave the transfer up; None if the transfer is complete.
        """
        self.conceal(transfer_id)
        self._end(transfer_id, reason)

    def fail(self, transfer_id: int, reason: str) -> None:
        """Fail a transfer.

        The caller then tells the sender. The sender closes the transfer when it has stopped writing.
        """
        self._conceal_in_time(transfer_id)
        self._end(transfer_id, reason)

    def _end(self, transfer_id: int, reason: str | None) -> None:
        grant_id = self.grants.pop(transfer_id, None)
        if reason is not None:
            self.given_up[transfer_id] = None
            if len(self.given_up) > _MOST_GIVEN_UP:
                del self.given_up[next(iter(self.given_up))]
        if grant_id is not None:
            self.target.remove_writer(grant_id, self, reason)

    def conceal(self, transfer_id: int) -> None:
        """Close the pages of this transfer that are open to the sender."""
        for lane in self.lanes.values():
            lane.conceal(transfer_id)

    def _conceal_in_time(self, transfer_id: int) -> None:
        for lane in self.lanes.values():
            lane.conceal_in_time(transfer_id)

    def revoke(self, grant_id: int, reason: str) -> None:
        """End the transfers to a grant that has failed or was revoked, and tell the sender to stop.

        The pages that are open to the sender are closed when the sender has answered with `Close`, or after
        `ack_timeout_s` seconds.
        """
        for transfer_id in [t for t, g in self.grants.items() if g == grant_id]:
            del self.grants[transfer_id]
            self.post(TransferEnded(transfer_id, brief(reason)))
            self._conceal_in_time(transfer_id)

    def completed(self, grant_id: int) -> None:
        """Close the pages of a complete grant that are open to the sender.

        The transfers to the grant stay open, as a write may be repeated.
        """
        for transfer_id in [t for t, g in self.grants.items() if g == grant_id]:
            self.conceal(transfer_id)

    def post(self, message: Message) -> None:
        """Send a message over the first lane."""
        for lane in self.lanes.values():
            lane.post(encode_frame(message))
            return

    def lost(self, reason: str) -> None:
        """Close all transfers, because the last lane has ended."""
        for grant_id in self.grants.values():
            self.target.remove_writer(grant_id, self, f"connection from {self.name} was lost: {reason}")
        self.grants.clear()
