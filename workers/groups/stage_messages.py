"""What the stages of a prefill pipeline say to each other (chunked pipeline parallelism, Mooncake, section
5.1).

The stages are a chain: each talks to the one behind it and the one before it, over ZeroMQ
(`mooncake.messages.bus`). The first one leads: it takes orders, and its decisions travel down the chain in
the order in which they were made; what stages have to say travels up.

    before                                behind
                          <-   StageHello, until answered
    StageWelcome          ->                                    or StageRefused
    Begin(prompt)         ->                                    get memory for it
                          <-   Usable(blocks)                   here and in all stages behind
    Pass, HiddenStates... ->                                    compute, in this order
                          <-   PassTaken                        it is being computed: room for one more
                          <-   FirstDrawn                       of a prompt that ended with a pass
                          <-   Stored                           all that the stages behind computed
                          <-   Sent                             their part of it is at the decode side
    End(prompt)           ->                                    aborted or failed: let go of it

Reuse that fails in a stage begins another *round* of the prompt: `Unusable` goes up, `Recount` comes down and
is answered by `Usable`, and the prompt is computed again from there. Passes of earlier rounds are skipped.

Owns: the vocabulary. Does not know: sockets.
"""

import msgspec

from mooncake.messages.pools import Capacity, PoolShard, PoolStats
from mooncake.messages.requests import TokenLogprobs
from mooncake.messages.workers import BlockOrder, Prefill


class StageHello(msgspec.Struct, tag=True, frozen=True):
    """First message of a stage to the one before it; the stages behind it are there.

    `capacity`: the least of its own and theirs. `engine`: what computes in all of them, for people.
    `shards`: their parts of the pool.
    """

    protocol_version: int
    stage: int
    num_stages: int
    fingerprint: str
    capacity: Capacity
    engine: str
    shards: tuple[PoolShard, ...]


class StageBeat(msgspec.Struct, tag=True, frozen=True):
    """I am alive, and these are the pools of this and all stages behind it."""

    pools: dict[str, PoolStats]
    """by the names of their messengers"""


class Usable(msgspec.Struct, tag=True, frozen=True):
    """The KVCache of so many blocks of the prompt, from the first on, need not be computed in this round."""

    job_id: int
    round: int
    num_blocks: int


class Unusable(msgspec.Struct, tag=True, frozen=True):
    """Some of what was to be reused in this round has not come."""

    job_id: int
    round: int


class PassTaken(msgspec.Struct, tag=True, frozen=True):
    """The oldest pass that was not taken is being computed."""


class FirstDrawn(msgspec.Struct, tag=True, frozen=True):
    """The last stage has drawn a prompt's first token."""

    job_id: int
    round: int
    token: int
    logprobs: TokenLogprobs | None = None


class Stored(msgspec.Struct, tag=True, frozen=True):
    """The prompt's KVCache is in the pool, as far as this stage and those behind it have computed it."""

    job_id: int


class Sent(msgspec.Struct, tag=True, frozen=True):
    """The decode side has what this stage and those behind it had to send of the prompt."""

    job_id: int


class PromptLeft(msgspec.Struct, tag=True, frozen=True):
    """Of a rank: nothing here reads or writes the prompt's pages any more. The last word about it."""

    job_id: int


class StageFailed(msgspec.Struct, tag=True, frozen=True):
    """This prompt cannot go on in this stage or one behind it."""

    job_id: int
    reason: str


class StageWelcome(msgspec.Struct, tag=True, frozen=True):
    """The stage is part of the pipeline."""


class StageRefused(msgspec.Struct, tag=True, frozen=True):
    """The stage does not fit; a restart would not help."""

    message: str


class StageAlive(msgspec.Struct, tag=True, frozen=True):
    """The stage before you is alive. If you are not `known`, it has begun anew, and so must you."""

    known: bool


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Get memory for a prompt. Stages serve these in order.

    `device_pages`: to a rank, which has those of the first one.
    """

    job_id: int
    order: Prefill
    device_pages: list[int] | None = None


class Recount(msgspec.Struct, tag=True, frozen=True):
    """A new round: say again what is usable."""

    job_id: int
    round: int


class PassShare(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[start, start + num_tokens)` of a prompt are part of a pass.

    `num_cached_blocks` are reused in this round: their tokens come before `start`, but for the very last one.
    """

    job_id: int
    round: int
    num_cached_blocks: int
    start: int
    num_tokens: int


class Pass(msgspec.Struct, tag=True, frozen=True):
    """A forward pass over `num_bytes` of hidden states: `[tokens, hidden_size]` in the model's dtype, the
    shares one after the other. `data` are the first bytes of them; the others follow in `HiddenStates`."""

    shares: list[PassShare]
    num_bytes: int
    data: bytes


class HiddenStates(msgspec.Struct, tag=True, frozen=True):
    """The next bytes of the newest pass."""

    data: bytes


class End(msgspec.Struct, tag=True, frozen=True):
    """The prompt is not wanted any more."""

    job_id: int


AboutJob = Usable | Unusable | FirstDrawn | Stored | Sent | StageFailed | PromptLeft
"""what goes up the chain to whoever works on the prompt"""
FromBehind = StageHello | StageBeat | PassTaken | AboutJob
FromBefore = (
    StageWelcome | StageRefused | StageAlive | Begin | Recount | Pass | HiddenStates | End | BlockOrder
)
