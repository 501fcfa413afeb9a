"""The messages between the ranks of a tensor-parallel group, beside the messages of stages.

The first rank leads: it takes orders from the Conductor, decides, and draws tokens. It has a link to each of
the other ranks, its followers. The link is like the link between two stages (`stage_messages`), and a prompt
is prefilled with the same messages. The leader alone chooses device pages, for all ranks.

    leader                                follower
    (StageHello, StageWelcome)
    Meet(path)            ->              join the process group
    PrefillPass           ->              compute, in this order; ranks wait only for each other's sums
    DecodePass            ->
    Call(id, work)        ->              work on a decoded sequence's blocks in the rank's own pool
    StopCall(id)          ->              cancel this work
                          <-   CallDone   once the work has stopped, or
                          <-   RankCallFailed

Owns: the vocabulary. Does not know: sockets.
"""

from enum import StrEnum

import msgspec

from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Grant, PoolShard, Tier
from mooncake.messages.quantities import Count
from mooncake.messages.requests import Request
from workers.groups.stage_messages import ChunkRange, FromBefore, FromBehind


class PassChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a pass (`workers.engine.batch.Chunk`) in a message.

    `pages` are the device pages of the sequence up to the chunk's end.
    """

    token_ids: list[int]
    start: int
    pages: list[int]


# -- work on a sequence that is decoded, named by its `number` ----------------------------------------


class ReservePrompt(msgspec.Struct, tag=True, frozen=True):
    """The order to reserve a prompt's pool pages and to grant the missing blocks.

    Its result is `PromptReserved`.
    """

    number: int
    request: Request


class AwaitArrival(msgspec.Struct, tag=True, frozen=True):
    """The order to wait until all granted pages have arrived."""

    number: int


class ReserveAndFetch(msgspec.Struct, tag=True, frozen=True):
    """The order to reserve blocks, and to fetch the missing ones from the pools of another instance.

    Its result is `BlocksFetched`. An earlier reservation of the sequence is released.
    """

    number: int
    keys: list[BlockKey]
    shards: tuple[PoolShard, ...]
    tenant: str


class LoadBlocks(msgspec.Struct, tag=True, frozen=True):
    """The order to copy the sequence's first blocks to device pages.

    The blocks come from host memory if `SaveToHost` has copied them there, else from the pool.
    """

    number: int
    pages: list[int]


class StoreBlocks(msgspec.Struct, tag=True, frozen=True):
    """The order to store device pages in the pool.

    The first blocks have `keys`; `num_private` blocks without a key follow. If `is_parked`, the blocks stay
    reserved for the sequence. `tokens` are the tokens of the keyed blocks, for KV events; None if KV events
    must not contain tokens.
    """

    number: int
    keys: list[BlockKey]
    num_private: int
    pages: list[int]
    tokens: list[int] | None
    is_parked: bool
    tenant: str


class SaveToHost(msgspec.Struct, tag=True, frozen=True):
    """The order to copy device pages to host memory."""

    number: int
    pages: list[int]


class ReleaseSequence(msgspec.Struct, tag=True, frozen=True):
    """The order to release a sequence's reservation and saved pages. Idempotent."""

    number: int


RankWork = (
    ReservePrompt | AwaitArrival | ReserveAndFetch | LoadBlocks | StoreBlocks | SaveToHost | ReleaseSequence
)


# -- leader -> follower -------------------------------------------------------------------------------


class Meet(msgspec.Struct, tag=True, frozen=True):
    """The order to join the process group whose ranks find each other through the file `path`."""

    path: str


class PrefillPass(msgspec.Struct, tag=True, frozen=True):
    """The order to compute a prefill pass.

    `are_last` has a flag for each chunk: whether the chunk ends its prompt, so that its logits are needed.
    """

    ranges: list[ChunkRange]
    chunks: list[PassChunk]
    are_last: list[bool]


class DecodePass(msgspec.Struct, tag=True, frozen=True):
    """The order to compute an iteration of the decode batch."""

    chunks: list[PassChunk]


class Call(msgspec.Struct, tag=True, frozen=True):
    """The order to perform `work`. Calls run concurrently."""

    call_id: int
    work: RankWork


class StopCall(msgspec.Struct, tag=True, frozen=True):
    """The order to cancel a call. The follower still answers the call, if it has not done so."""

    call_id: int


# -- follower -> leader -------------------------------------------------------------------------------


class PromptReserved(msgspec.Struct, tag=True, frozen=True):
    """The result of `ReservePrompt`: a grant, and the tiers of the leading blocks that are in the pool."""

    grant: Grant
    cached_tiers: list[Tier | None]


class BlocksFetched(msgspec.Struct, tag=True, frozen=True):
    """The result of `ReserveAndFetch`: the number of leading blocks that are in this pool now."""

    num_blocks: Count


RankResult = PromptReserved | BlocksFetched


class CallDone(msgspec.Struct, tag=True, frozen=True):
    """The report that a call is done, with the result of its work; None if such work has no result."""

    call_id: int
    result: RankResult | None = None


class FailureKind(StrEnum):
    """The kind of error (of `mooncake.errors`) that ended a call; STOPPED if the call was cancelled."""

    POOL_FULL = "pool_full"
    POOL = "pool"
    TRANSFER = "transfer"
    STOPPED = "stopped"


class RankCallFailed(msgspec.Struct, tag=True, frozen=True):
    """The report that a call has failed or was cancelled. No part of its work runs any more."""

    call_id: int
    kind: FailureKind
    reason: str


RankAnswer = CallDone | RankCallFailed
FromFollower = FromBehind | RankAnswer
ToFollower = Meet | PrefillPass | DecodePass | Call | StopCall
FromLeader = FromBefore | ToFollower
