"""Requests to another messenger: to place a write, to fetch blocks, to discard bytes.

Owns: the kinds of requests, and how they end. Does not know: lanes, sockets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, NoReturn

from messenger.wire.messages import Fetch, Write


class WriteOutcome(Enum):
    """The result of a write."""

    PLACED = auto()
    """The bytes are verified and in their page.

    The receiver has acknowledged them, unless this side has copied them (`WriteRequest.is_copied`).
    """
    CORRUPT = auto()
    """The write was refused, because the bytes did not match their checksums."""
    FAILED = auto()
    """The write was refused for another reason, lost with its lanes, or never sent."""


class Urgency(IntEnum):
    """The class of a transfer: latency goes before bulk.

    The members are integers, as these are fast keys for the dicts that every request uses.
    """

    LATENCY = auto()
    """A request waits for the transfer."""
    BULK = auto()
    """Nothing waits for the transfer: copies of hot prefixes, blocks that are copied ahead of a migration."""


@dataclass(slots=True, eq=False)
class WriteRequest:
    """A request to place one frame of writes. `done` is called exactly once.

    After `done` no byte of the source is read for the request, with one exception: if a TCP lane was lost,
    the kernel may still send bytes. Bytes that have changed by then do not match their checksum, and are
    refused.
    """

    write: Write
    num_bytes: int
    urgency: Urgency
    done: Callable[[WriteOutcome, str], None]
    is_wanted: Callable[[], bool]
    """A function that returns whether the request still needs to be sent."""
    acknowledged: Callable[[str | None], None]
    """A callback for the end of a write that this side has copied, called once, after `done`.

    The argument is None when the receiver has acknowledged the write, else the reason of the failure.
    """
    num_lanes_lost: int = 0
    """Lanes that were lost with this request in flight."""
    is_copied: bool = False
    """Whether this side has copied the bytes into their pages; the receiver has yet to acknowledge them."""

    @property
    def layer_bytes(self) -> int:
        return self.num_bytes // sum([entry.num_layers for entry in self.write.entries])

    @property
    def moving_bytes(self) -> int:
        """The bytes of the request that the lane still has to move, for which other requests wait."""
        return 0 if self.is_copied else self.num_bytes

    def fail(self, reason: str) -> None:
        if self.is_copied:
            self.acknowledged(reason)
        else:
            done, self.done = self.done, done_already
            done(WriteOutcome.FAILED, reason)


@dataclass(slots=True, eq=False)
class FetchRequest:
    """A request to fetch layers of some blocks into `views`, which have no other user until `done`.

    `done` is called exactly once: with the verified checksums of each block that has arrived, by its index;
    or with the reason why none has arrived.
    """

    fetch: Fetch
    views: Sequence[memoryview]
    layer_bytes: int
    urgency: Urgency
    done: Callable[[dict[int, bytes], str | None], None]
    num_lanes_lost: int = 0
    """Lanes that were lost with this request in flight."""
    is_read: bool = False
    """Whether the request is done because this side has copied the blocks."""
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
    """A request whose bytes the peer discards."""

    payload: memoryview
    urgency: Urgency
    done: Callable[[str | None], None]
    num_lanes_lost: int = 0
    """Lanes that were lost with this request in flight."""

    @property
    def num_bytes(self) -> int:
        return len(self.payload)

    @property
    def moving_bytes(self) -> int:
        return self.num_bytes

    def fail(self, reason: str) -> None:
        self.done(reason)


LaneRequest = WriteRequest | FetchRequest | ProbeRequest


def done_already(*_: Any) -> NoReturn:
    """Stand in for a request's `done` after its call.

    So no reference cycle through the request's owner is left.
    """
    raise AssertionError("a request is done once")
