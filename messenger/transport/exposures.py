"""The parts of this side's segment that one lane exposes to its peer, which reaches them by itself.

Over a socket the peer reaches nothing. Other transports have exposures of their own.

Owns: the interface. Does not know: how a peer reaches memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from messenger.wire.messages import ExposedPage


class Range(NamedTuple):
    """The bytes `[offset, offset + size_bytes)` of a segment, or of other memory that peers may reach."""

    offset: int
    size_bytes: int


class Exposures:
    """The exposures of a lane whose peer reaches nothing by itself."""

    lets_place: bool = False
    """Whether the peer may place the bytes of its writes in granted pages, without asking for each page."""
    opens_ranges: bool = False
    """Whether ranges are opened to the peer one by one: granted pages for writes, found blocks for reads."""

    async def expose(
        self, transfer_id: int, pages: Sequence[tuple[int, Range]], on_closed: Callable[[], None]
    ) -> list[ExposedPage]:
        """Open pages for writes, and return their addresses and remote keys.

        `pages` has the number and the range of each page. `on_closed` is called once, when the peer cannot
        write the pages any more, also if the call fails. Called only if `opens_ranges`. Raises TransferError.
        """
        raise NotImplementedError

    async def open_to_read(self, places: Sequence[Range]) -> tuple[list[int], list[int], Callable[[], None]]:
        """Open ranges for reads.

        Returns their addresses, their remote keys, and a callback that closes the ranges. Called only if
        `opens_ranges`. Raises TransferError.
        """
        raise NotImplementedError

    def conceal(self, transfer_id: int) -> None:
        """Close the pages of a transfer now. Idempotent."""

    def conceal_within(self, transfer_id: int, timeout_s: float) -> None:
        """Close the pages of a transfer after `timeout_s` seconds.

        The peer was told to stop. If the peer confirms earlier, `conceal` closes the pages.
        """

    def close(self) -> None:
        """Close everything that is open."""
