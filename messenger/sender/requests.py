"""Requests to another messenger: to place a write, to send blocks, to discard bytes.

Owns: the kinds of requests, and how they end. Does not know: lanes, sockets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, NoReturn

from messenger.wire.messages import Fetch, Write


class WriteOutcome(Enum):
    """Result of a write."""

    PLACED = auto()
    """Verified, in its page; and acknowledged by the receiver, unless the request `is_placed`."""
    CORRUPT = auto()
    """Refused, because the bytes did not match their checksums."""
    FAILED = auto()
    """Refused for another reason, lost with the last lane, or never sent."""


class Urgency(IntEnum):
    """Class of a transfer: latency goes before bulk. An integer, as it is looked up for every request."""

    LATENCY = auto()
    """A request waits for the transfer."""
    BULK = auto()
    """Nothing waits for the transfer: copies of hot prefixes, blocks that are copied ahead of a migration."""


@dataclass(slots=True, eq=False)
class WriteRequest:
    """One frame of writes. `done` runs exactly once.

    Then no byte of the source will be read for it, unless a lane by TCP was lost: bytes that the kernel still
    sends are refused for their checksum if they have changed.
    """

    write: Write
    num_bytes: int
    urgency: Urgency
    done: Callable[[WriteOutcome, str], None]
    is_wanted: Callable[[], bool]
    """Returns whether the request still needs to be sent."""
    confirmed: Callable[[str | None], None]
    """Called once if the write was done before the receiver had been told: with None when it has heard, or
    with the reason why not."""
    num_lanes_lost: int = 0
    """Lanes in a row that were lost with this request in flight."""
    is_placed: bool = False
    """Whether the bytes are in their pages, and only the receiver is still to be told."""

    @property
    def layer_bytes(self) -> int:
        return self.num_bytes // sum([entry.num_layers for entry in self.write.entries])

    @property
    def moving_bytes(self) -> int:
        """Bytes that other requests on a lane wait for."""
        return 0 if self.is_placed else self.num_bytes

    def fail(self, reason: str) -> None:
        if self.is_placed:
            self.confirmed(reason)
        else:
            done, self.done = self.done, done_already
            done(WriteOutcome.FAILED, reason)


@dataclass(slots=True, eq=False)
class FetchRequest:
    """Layers of some blocks, wanted in `views`, which only this request touches until `done`.

    `done` runs exactly once: with the verified checksums of each block that is there now, by its index; or
    with the reason why there is none.
    """

    fetch: Fetch
    views: Sequence[memoryview]
    layer_bytes: int
    urgency: Urgency
    done: Callable[[dict[int, bytes], str | None], None]
    num_lanes_lost: int = 0
    """Lanes in a row that were lost with this request in flight."""
    is_read: bool = False
    """Whether the request is done, because this side has copied the blocks."""
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(map(len, self.views))  # once: it is asked for many times

    @property
    def moving_bytes(self) -> int:
        return 0 if self.is_read else self.num_bytes

    def fail(self, reason: str) -> None:
        self.done({}, reason)


@dataclass(slots=True, eq=False)
class ProbeRequest:
    """Bytes that the peer discards."""

    payload: memoryview
    urgency: Urgency
    done: Callable[[str | None], None]
    num_lanes_lost: int = 0
    """Lanes in a row that were lost with this request in flight."""

    @property
    def num_bytes(self) -> int:
        return len(self.payload)

    @property
    def moving_bytes(self) -> int:
        return self.num_bytes

    def fail(self, reason: str) -> None:
        self.done(reason)


Request = WriteRequest | FetchRequest | ProbeRequest


def done_already(*_: Any) -> NoReturn:
    """Stand in for a request's `done` from then on: a cycle through its owner would be left for the garbage
    collector."""
    raise AssertionError("a request is done once")
