"""What the ranks of a tensor-parallel group say to each other, beside the words of stages.

The first rank leads: it takes orders from the Conductor, decides, and draws tokens. It has a link to each of
the others, its followers, as a stage has to the next one (`stage_messages`): a prompt is prefilled with the
same words. Pages of the device are the leader's: it names them, and no follower chooses any.

    leader                                follower
    (StageHello, StageWelcome)
    Meet(path)            ->              join the process group
    PrefillPass           ->              compute, in this order; the ranks' sums are all that is waited for
    DecodePass            ->
    Call(id, work)        ->              what a sequence that is decoded needs of a rank's own pool
    StopCall(id)          ->              if it is not wanted any more
                          <-   Done       either way, once nothing of it goes on
                          <-   Failed

Owns: the vocabulary. Does not know: sockets.
"""

from enum import StrEnum

import msgspec

from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Grant
from mooncake.messages.requests import Request
from workers.groups.stage_messages import FromBefore, FromBehind, PassShare


class PassChunk(msgspec.Struct, frozen=True, array_like=True):
    """`workers.engine.batch.Chunk`, with the pages up to its end."""

    token_ids: list[int]
    start: int
    pages: list[int]


# -- work on a sequence that is decoded, named by its `number` ----------------------------------------


class Hold(msgspec.Struct, tag=True, frozen=True):
    """Reserve the prompt's pages, and open those that lack to whoever prefills. Done with `Held`."""

    number: int
    request: Request


class AwaitArrival(msgspec.Struct, tag=True, frozen=True):
    """Done when all that was granted has arrived."""

    number: int


class Load(msgspec.Struct, tag=True, frozen=True):
    """Bring the first blocks to these pages of the device."""

    number: int
    pages: list[int]


class Keep(msgspec.Struct, tag=True, frozen=True):
    """Store these pages in the pool: blocks with `keys`, then `num_private` others.

    They are held as the sequence's if it `is_parked`. `tokens`: what the keys stand for, if others may know.
    """

    number: int
    keys: list[BlockKey]
    num_private: int
    pages: list[int]
    tokens: list[int] | None
    is_parked: bool


class Save(msgspec.Struct, tag=True, frozen=True):
    """Copy these pages to the host's memory."""

    number: int
    pages: list[int]


class Restore(msgspec.Struct, tag=True, frozen=True):
    """Bring what was saved to these pages."""

    number: int
    pages: list[int]


class LetGo(msgspec.Struct, tag=True, frozen=True):
    """Give back what is held or saved. Idempotent."""

    number: int


Work = Hold | AwaitArrival | Load | Keep | Save | Restore | LetGo


# -- leader -> follower -------------------------------------------------------------------------------


class Meet(msgspec.Struct, tag=True, frozen=True):
    """Join the process group, in a file of this name."""

    path: str


class PrefillPass(msgspec.Struct, tag=True, frozen=True):
    """A pass over parts of prompts. `are_last`: logits are wanted of their last tokens."""

    shares: list[PassShare]
    chunks: list[PassChunk]
    are_last: list[bool]


class DecodePass(msgspec.Struct, tag=True, frozen=True):
    """An iteration."""

    chunks: list[PassChunk]


class Call(msgspec.Struct, tag=True, frozen=True):
    """Calls go on side by side."""

    call_id: int
    work: Work


class StopCall(msgspec.Struct, tag=True, frozen=True):
    """It has been answered, or is to be soon."""

    call_id: int


# -- follower -> leader -------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True):
    """`num_cached` blocks, from the first on, are there."""

    num_cached: int
    grant: Grant


class Done(msgspec.Struct, tag=True, frozen=True):
    """`held` answers `Hold`."""

    call_id: int
    held: Held | None = None


class FailureKind(StrEnum):
    """Which error of `mooncake.errors` it was."""

    POOL_FULL = "pool_full"
    POOL = "pool"
    TRANSFER = "transfer"
    STOPPED = "stopped"


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The work has not been done, and nothing of it goes on."""

    call_id: int
    kind: FailureKind
    reason: str


Answer = Done | Failed
FromFollower = FromBehind | Answer
ToFollower = Meet | PrefillPass | DecodePass | Call | StopCall
FromLeader = FromBefore | ToFollower
