"""Messages between the stages of a prefill pipeline (chunked pipeline parallelism, Mooncake, section 5.1).

The stages are a chain: each talks to the previous stage and to the next stage, over ZeroMQ
(`mooncake.bus.zeromq`). The first stage leads. It takes orders, and its decisions travel down the chain in
the order in which they were made; the stages' reports travel up.

    previous stage                        next stage
                          <-   StageHello, until answered
    StageWelcome          ->                                    or StageRefused
    Begin(prompt)         ->                                    get memory for it
                          <-   Usable(blocks)                   here and in all later stages
    Pass, HiddenStates... ->                                    compute, in this order
                          <-   PassTaken                        it is being computed: one more may be sent
                          <-   FirstDrawn                       the first token of a prompt
                          <-   Stored                           the blocks are in this and all later pools
                          <-   Sent                             the blocks are at the decode side
    End(prompt)           ->                                    aborted or failed: release its memory

If a stage cannot reuse blocks as planned, another *round* of the prompt begins. `Unusable` goes up to the
first stage, `Recount` comes down, and each stage answers with `Usable` again. Then the prompt is computed
from the end of the usable blocks on. Passes of earlier rounds are skipped.

Owns: the vocabulary. Does not know: sockets.
"""

import msgspec

from mooncake.messages.block_orders import BlockOrder
from mooncake.messages.pools import Capacity, PoolShard, PoolStats
from mooncake.messages.requests import TokenLogprobs
from mooncake.messages.workers import Prefill


class StageHello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a stage to the previous stage, sent when all later stages have joined.

    `capacity` is the least capacity of this stage and all later stages. `engine` names the engines of all
    these stages, as text, and `shards` are their parts of the pool.
    """

    protocol_version: int
    stage: int
    num_stages: int
    fingerprint: str
    capacity: Capacity
    engine: str
    shards: tuple[PoolShard, ...]


class StageBeat(msgspec.Struct, tag=True, frozen=True):
    """The report that the stage is alive, with the pool counters of this stage and all later stages."""

    pools: dict[str, PoolStats]
    """Pool counters by messenger name."""


class Usable(msgspec.Struct, tag=True, frozen=True):
    """The report that a prompt's first `num_blocks` blocks can be reused in this stage and all later stages.

    These blocks need not be computed in this round.
    """

    job_id: int
    round: int
    num_blocks: int


class Unusable(msgspec.Struct, tag=True, frozen=True):
    """The report that this round cannot reuse all planned blocks: some have not arrived, or are damaged."""

    job_id: int
    round: int


class PassTaken(msgspec.Struct, tag=True, frozen=True):
    """The report that a stage has begun to compute the oldest pass that it had received and not begun."""


class FirstDrawn(msgspec.Struct, tag=True, frozen=True):
    """The report that the last stage has drawn a prompt's first token."""

    job_id: int
    round: int
    token: int
    logprobs: TokenLogprobs | None = None


class Stored(msgspec.Struct, tag=True, frozen=True):
    """The report that the pools of this stage and all later stages have the prompt's computed blocks."""

    job_id: int


class Sent(msgspec.Struct, tag=True, frozen=True):
    """The report that the decode side has all of the prompt's blocks from this stage and all later stages."""

    job_id: int


class PromptLeft(msgspec.Struct, tag=True, frozen=True):
    """The report that a rank no longer reads or writes the prompt's device pages.

    It is the rank's last message about the prompt.
    """

    job_id: int


class StageFailed(msgspec.Struct, tag=True, frozen=True):
    """The report that the prompt has failed in this stage or in a later stage."""

    job_id: int
    reason: str


class StageWelcome(msgspec.Struct, tag=True, frozen=True):
    """The answer that the stage has joined the pipeline."""


class StageRefused(msgspec.Struct, tag=True, frozen=True):
    """The answer that the stage does not match the pipeline, and that a restart would not help."""

    message: str


class StageAlive(msgspec.Struct, tag=True, frozen=True):
    """The beat of the previous stage.

    `known` is False if the receiver has not joined the sender's present session, because the sender has
    restarted its session. Then the receiver must restart its own session.
    """

    known: bool


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The order to get memory for a prompt. A stage carries out these orders one after the other.

    `device_pages` are the pages that the first rank has chosen for all ranks; None between stages.
    """

    job_id: int
    order: Prefill
    device_pages: list[int] | None = None


class Recount(msgspec.Struct, tag=True, frozen=True):
    """The order to begin a new round of a prompt, and to report the usable blocks again."""

    job_id: int
    round: int


class ChunkRange(msgspec.Struct, frozen=True, array_like=True):
    """A prompt's chunk in a pass: tokens `[start, start + num_tokens)` of the prompt.

    The first `num_cached_blocks` blocks are reused in this round. Their tokens come before `start`, except
    the last token of the prompt, which is always computed.
    """

    job_id: int
    round: int
    num_cached_blocks: int
    start: int
    num_tokens: int


class Pass(msgspec.Struct, tag=True, frozen=True):
    """The order to compute a forward pass over `num_bytes` of hidden states.

    The states are `[tokens, hidden_size]` in the model's dtype, one chunk after the other. `data` has the
    first bytes; the others follow in `HiddenStates`.
    """

    ranges: list[ChunkRange]
    num_bytes: int
    data: bytes


class HiddenStates(msgspec.Struct, tag=True, frozen=True):
    """The next bytes of the latest pass's hidden states."""

    data: bytes


class End(msgspec.Struct, tag=True, frozen=True):
    """The order to release a prompt's memory, because the prompt has ended or was aborted."""

    job_id: int


AboutJob = Usable | Unusable | FirstDrawn | Stored | Sent | StageFailed | PromptLeft
"""The reports about a prompt, which travel up the chain of stages."""
FromBehind = StageHello | StageBeat | PassTaken | AboutJob
FromBefore = (
    StageWelcome | StageRefused | StageAlive | Begin | Recount | Pass | HiddenStates | End | BlockOrder
)
