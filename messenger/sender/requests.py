"""What is asked of another messenger: to place a write, to send blocks, to take bytes for nobody.

Owns: what a request is, and how it ends. Does not know: lanes, sockets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, NoReturn

from messenger.wire.messages import Fetch, Write


class WriteOutcome(Enum):
    """What became of a write."""

    PLACED = auto()
    """verified, in its page; and acknowledged by the receiver, unless the request `is_placed`"""
    CORRUPT = auto()
    """refused: its bytes did not match their checksums"""
    FAILED = auto()
    """refused for another reason, lost with the last lane, or never sent"""


class Urgency(IntEnum):
    """Class of a transfer: latency goes before bulk. An integer, as it is looked up for every request."""

    LATENCY = auto()
    """somebody waits for it"""
    BULK = auto()
    """replication, demotion"""


@dataclass(slots=True, eq=False)
class WriteRequest:
    """One frame of writes. `done` runs exactly once. Then no byte of the source will be read for it, unless a
    lane by TCP was lost: what the kernel still sends of it is refused for its checksum if it has changed."""

    write: Write
    num_bytes: int
    urgency: Urgency
    done: Callable[[WriteOutcome, str], None]
    is_wanted: Callable[[], bool]
    """else it need not be sent any more"""
    confirmed: Callable[[str | None], None]
    """once, if it was done when the receiver only had to be told: it has heard, or why not"""
    num_lanes_lost: int = 0
    """under it"""
    is_placed: bool = False
    """it is done: the bytes are in their pages, and the receiver is to hear of it"""

    @property
    def layer_bytes(self) -> int:
        return self.num_bytes // sum([entry.num_layers for entry in self.write.entries])

    @property
    def moving_bytes(self) -> int:
        """That others on a lane wait for."""
        return 0 if self.is_placed else self.num_bytes

    def lost(self, reason: str) -> None:
        if self.is_placed:
            self.confirmed(reason)
        else:
            done, self.done = self.done, done_already
            done(WriteOutcome.FAILED, reason)


@dataclass(slots=True, eq=False)
class FetchRequest:
    """Layers of some blocks, wanted in `views`, which nobody else touches until `done`.

    `done` runs exactly once: with the verified checksums of each block that is there now, by its index; or
    with the reason why there is none.
    """

    fetch: Fetch
    views: Sequence[memoryview]
    layer_bytes: int
    urgency: Urgency
    done: Callable[[dict[int, bytes], str | None], None]
    num_lanes_lost: int = 0
    """under it"""
    is_read: bool = False
    """it is done: this side has copied the blocks"""
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(map(len, self.views))  # once: it is asked for many times

    @property
    def moving_bytes(self) -> int:
        return 0 if self.is_read else self.num_bytes

    def lost(self, reason: str) -> None:
        self.done({}, reason)


@dataclass(slots=True, eq=False)
class ProbeRequest:
    """Bytes for nobody."""

    payload: memoryview
    urgency: Urgency
    done: Callable[[str | None], None]
    num_lanes_lost: int = 0
    """under it"""

    @property
    def num_bytes(self) -> int:
        return len(self.payload)

    @property
    def moving_bytes(self) -> int:
        return self.num_bytes

    def lost(self, reason: str) -> None:
        self.done(reason)


Request = WriteRequest | FetchRequest | ProbeRequest


def done_already(*_: Any) -> NoReturn:
    """What `done` of a request is from then on: a circle through its owner would be left for the garbage
    collector."""
    raise AssertionError("a request is done once")
