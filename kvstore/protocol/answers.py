"""Messages of a messenger to the worker and the clients of its pool part. Most are answers to `calls`.

Owns: the vocabulary of these messages. Does not know: sockets.
"""

from enum import StrEnum

import msgspec

from mooncake.errors import ConfigError, MismatchError, MooncakeError, PoolError, PoolFullError, TransferError
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Grant, MessengerAddress, PoolStats, Tier

LOCATIONS: tuple[Tier | None, ...] = (None, *Tier)
"""The tiers in which a block can be, after None for a missing block. `Located` names them by index."""


class Attached(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    address: MessengerAddress
    wants_token_ids: bool


class Connected(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Connect`.

    `version` is the newest version that both sides speak; pools of version 1 do not send it.
    """

    call_id: int
    address: MessengerAddress
    fingerprint: str
    layout: KVLayout
    version: int = 1


class ReservedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A page of a reservation.

    `sealed`: whether the block is stored in the page already, so that the page may only be read. `tier`: the
    tier of a sealed block before this reservation; None for other blocks.
    """

    page: int
    generation: int
    sealed: bool
    tier: Tier | None = None


class Reservation(msgspec.Struct, tag="Reserved", frozen=True):
    """The pages of a request: one for each of its keys, in order, then the private pages."""

    call_id: int
    reservation_id: int
    blocks: list[ReservedBlock]


class Granted(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    grant: Grant


class LayersFetched(msgspec.Struct, tag=True, frozen=True):
    """The progress of a fetch: its first `num_blocks` blocks have layers `[0, num_layers)`, all verified.

    This is no answer: several such messages are sent during a fetch. While only a part of the next layers has
    arrived, the same numbers are sent again. Blocks from `num_blocks` on have been given up: they keep the
    layers that they have, and the caller may write their other layers.
    """

    call_id: int
    num_blocks: int
    num_layers: int


class Fetched(msgspec.Struct, tag=True, frozen=True):
    """The end of a fetch: for each block, the number of leading layers that have arrived.

    A block with all layers is sealed. `pages`: the present pages of the blocks. If the source hung, blocks
    that it might still write have new pages.
    """

    call_id: int
    num_layers: list[int]
    pages: list[int]


class Located(msgspec.Struct, tag=True, frozen=True):
    """The tiers of blocks: for each key one byte, which is an index into `LOCATIONS`."""

    call_id: int
    locations: bytes


class Leased(msgspec.Struct, tag=True, frozen=True):
    """A lease: the page of each block; None for a block that is missing, or cannot be promoted now."""

    call_id: int
    lease_id: int
    pages: list[int | None]


class Count(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    num_blocks: int


class BlockInfo(msgspec.Struct, frozen=True, array_like=True):
    """One copy of a block.

    `num_users`: the number of reservations, leases, holds and hard pins that keep the copy in its page.
    """

    key: BlockKey
    tier: Tier
    num_uses: int
    num_users: int


class Listing(msgspec.Struct, tag=True, frozen=True):
    """Some blocks of a pool. `next_cursor` is the cursor of the next call, or None at the end.

    Blocks that are stored or removed meanwhile may be missed or named twice.
    """

    call_id: int
    blocks: list[BlockInfo]
    next_cursor: int | None


class Verified(msgspec.Struct, tag=True, frozen=True):
    """The result of `VerifyBlocks`. `damaged`: the keys of blocks with a damaged copy, which was dropped."""

    call_id: int
    num_intact: int
    damaged: list[BlockKey]


class GotBlocks(msgspec.Struct, tag=True, frozen=True):
    """The answer to `GetBlocks`. The layers of the `found` blocks follow it, in order.

    `checksums`: the checksums of the layers that follow, ordered as in `PutBlocks`.
    """

    call_id: int
    found: list[bool]
    checksums: bytes


class Stats(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    stats: PoolStats


class Done(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class ErrorKind(StrEnum):
    """The kind of error of `mooncake.errors` that a failed call raises."""

    POOL_FULL = "pool_full"
    POOL = "pool"
    TRANSFER = "transfer"
    MISMATCH = "mismatch"
    CONFIG = "config"


class CallFailed(msgspec.Struct, tag=True, frozen=True):
    """The answer to a call that failed in the messenger; the caller raises the same error.

    `space_epoch` is set for POOL_FULL. `mismatch` is set for MISMATCH: what differs, the messenger's value,
    the caller's value.
    """

    call_id: int
    kind: ErrorKind
    message: str
    space_epoch: int = 0
    mismatch: tuple[str, str, str] | None = None

    @classmethod
    def of(cls, call_id: int, error: MooncakeError) -> "CallFailed":
        """Return the answer that makes the other side raise `error`."""
        match error:
            case PoolFullError():
                return cls(call_id, ErrorKind.POOL_FULL, str(error), space_epoch=error.space_epoch)
            case MismatchError():
                mismatch = (error.what, str(error.ours), str(error.theirs))
                return cls(call_id, ErrorKind.MISMATCH, str(error), mismatch=mismatch)
            case TransferError():
                return cls(call_id, ErrorKind.TRANSFER, str(error))
            case ConfigError():
                return cls(call_id, ErrorKind.CONFIG, str(error))
            case _:
                return cls(call_id, ErrorKind.POOL, str(error))

    def error(self, advice: str) -> MooncakeError:
        """Return the error that the caller raises. `advice`: text that says what to do about a mismatch."""
        match self.kind:
            case ErrorKind.POOL_FULL:
                return PoolFullError(self.message, self.space_epoch)
            case ErrorKind.TRANSFER:
                return TransferError(self.message)
            case ErrorKind.CONFIG:
                return ConfigError(self.message)
            case ErrorKind.MISMATCH if self.mismatch is not None:
                what, theirs, ours = self.mismatch
                return MismatchError(what, ours, theirs, advice)
            case _:
                return PoolError(self.message)


class Detached(msgspec.Struct, tag=True, frozen=True):
    """The end of the session, because the worker or client has sent an invalid message."""

    reason: str


Answer = (
    Attached
    | Connected
    | Reservation
    | Granted
    | Fetched
    | Located
    | Leased
    | Count
    | Listing
    | Verified
    | Stats
    | Done
    | CallFailed
)
FromPool = Answer | LayersFetched | Detached
FromRemotePool = FromPool | GotBlocks
