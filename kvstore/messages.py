"""Every message between a worker and its messenger: one msgpack packet each, on their Unix socket.

A call carries a `call_id` and is answered by exactly one packet with the same id, possibly much later.
`Commit` is no call: commits are frequent, ordered, and what goes wrong with one ends the session.

Owns: the vocabulary and its encoding. Does not know: sockets.
"""

from enum import StrEnum

import msgspec

from mooncake.blocks import BlockKey, KVLayout
from mooncake.messages import Grant, MessengerAddress, PoolStats

MAX_MESSAGE_BYTES = 384 * 1024
"""Fits the socket buffer that Linux grants by default; 4,096 keys take 72 KiB."""


class Attach(msgspec.Struct, tag=True, frozen=True):
    """First message of a worker. Answered by `Attached`, with the segment's descriptor, or `CallFailed`."""

    call_id: int
    instance: str
    incarnation: int
    fingerprint: str
    layout: KVLayout


class ReservePages(msgspec.Struct, tag=True, frozen=True):
    """Lease or reserve a page for each key, and `num_private` unkeyed ones. Answered by `Reserved`."""

    call_id: int
    keys: list[BlockKey]
    num_private: int


class AwaitSpace(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Done` when the pool's space epoch exceeds `space_epoch`."""

    call_id: int
    space_epoch: int


class Commit(msgspec.Struct, tag=True, frozen=True):
    """The worker has written layers `[layer_begin, layer_end)` of `pages`.

    `checksums`: little-endian xxh3-64, page by page, within a page layer by layer. Ignored if the
    reservation has been released meanwhile.
    """

    reservation_id: int
    layer_begin: int
    layer_end: int
    pages: list[int]
    checksums: bytes


class OpenGrant(msgspec.Struct, tag=True, frozen=True):
    """Open this reservation's incomplete pages to remote writes. Answered by `Granted`."""

    call_id: int
    reservation_id: int


class StartSend(msgspec.Struct, tag=True, frozen=True):
    """Stream this reservation's blocks to `grant`. Answered by `Done` at once."""

    call_id: int
    reservation_id: int
    grant: Grant
    ref_text: str


class AwaitSent(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Done` when the receiver has acknowledged everything."""

    call_id: int
    reservation_id: int


class AwaitArrived(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Done` when every granted page is complete and verified."""

    call_id: int
    reservation_id: int


class Release(msgspec.Struct, tag=True, frozen=True):
    """Give a reservation up. Answered by `Done`, also if there is none."""

    call_id: int
    reservation_id: int


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Stats`. `check_integrity` looks at every page."""

    call_id: int
    check_integrity: bool


class Attached(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    address: MessengerAddress


class ReservedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A page of a reservation. `sealed`: the block is there already and may only be read."""

    page: int
    generation: int
    sealed: bool


class Reservation(msgspec.Struct, tag="Reserved", frozen=True):
    """The pages of a request: those of its keys, in order, then private ones."""

    call_id: int
    reservation_id: int
    blocks: list[ReservedBlock]


class Granted(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    grant: Grant


class Stats(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    stats: PoolStats


class Done(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class ErrorKind(StrEnum):
    """Which error of `mooncake.errors` a failed call raises."""

    POOL_FULL = "pool_full"
    POOL = "pool"
    TRANSFER = "transfer"
    MISMATCH = "mismatch"
    CONFIG = "config"


class CallFailed(msgspec.Struct, tag=True, frozen=True):
    """`space_epoch` is set for POOL_FULL, `mismatch` (what, the messenger's, the worker's) for MISMATCH."""

    call_id: int
    kind: ErrorKind
    message: str
    space_epoch: int = 0
    mismatch: tuple[str, str, str] | None = None


class Detached(msgspec.Struct, tag=True, frozen=True):
    """The messenger ends the session because of what the worker sent."""

    reason: str


Call = (
    Attach | ReservePages | AwaitSpace | OpenGrant | StartSend | AwaitSent | AwaitArrived | Release | GetStats
)
FromWorker = Call | Commit
Answer = Attached | Reservation | Granted | Stats | Done | CallFailed
ToWorker = Answer | Detached
