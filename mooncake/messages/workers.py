"""The messages between workers and the Conductor, over ZeroMQ.

All are msgspec structs, sent as one msgpack frame each; the struct's name is its tag. Work is named by a
`Ref` (the Conductor's epoch, the request, the attempt), and a worker's socket identity carries its
incarnation, so late messages are recognised. `docs/request-path.md` shows their order in a request's life.
Fronts have messages of their own (`mooncake.messages.fronts`).

Owns: this vocabulary, the senders and receivers of each message. Does not know: sockets.
"""

from enum import StrEnum

import msgspec

from mooncake.messages.block_orders import BlockOrder
from mooncake.messages.blocks import KVLayout
from mooncake.messages.migration import (
    FromMigration,
    HeadsPlace,
    HeadsSupport,
    MigrationOrder,
    MovesStats,
    PlaceHeads,
)
from mooncake.messages.pools import Capacity, Grant, PoolShard, PoolStats, PrefixSource
from mooncake.messages.quantities import Count, Seconds, Span, TokenId
from mooncake.messages.requests import FinishReason, Held, Ref, Request, TokenLogprobs
from mooncake.versions import Versions

PROTOCOL_VERSION = 28
"""Version of the messages among Conductor, fronts, workers and stages, and of KV events.

It is that of the release before, or one more if any of the messages has changed since (`mooncake.versions`).
"""
SPOKEN = Versions(27, PROTOCOL_VERSION)
"""Versions that Conductor, fronts and workers speak. Stages and ranks of one instance have one version."""


class Role(StrEnum):
    """The role of an instance: a state, not a kind, as every worker can do both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """The instance decodes, and computes the prompts of its own requests: coupled chunked prefill."""


STAGES = (Role.PREFILL, Role.DECODE)
"""The roles that a request needs, of two instances or of one that has both."""


class InstanceState(StrEnum):
    """States of an instance. Only a SERVING instance gets requests."""

    SERVING = "serving"
    SWITCHING = "switching"
    """The instance gets no new requests, and has another role as soon as it has none left."""
    DRAINING = "draining"
    """The instance gets no new requests, and ends when it has none left; it may serve again before."""
    RETIRING = "retiring"
    """The instance drains as its worker has been told to end."""
    RETIRED = "retired"
    """The instance has no request left, and has been told so."""


# -- worker -> Conductor ----------------------------------------------------------------------------


class Register(msgspec.Struct, tag=True, frozen=True):
    """The first message of a worker's connection. Answered by `Registered` or `RegisterRefused`."""

    oldest_version: int = msgspec.field(name="protocol_version")
    """Oldest version of these messages that the worker speaks; release 27 knows it by its other name."""
    instance: str
    incarnation: int
    role: Role
    fingerprint: str
    layout: KVLayout
    shards: tuple[PoolShard, ...]
    """Shards of the instance's part of the pool: one for each stage or rank."""
    capacity: Capacity
    engine: str
    """Device and kernels, for people."""
    idle_cores: frozenset[Count] = frozenset()
    """Cores of its host on which it computes as long as other processes leave them idle."""
    device: str = ""
    """Name of its GPU or processor; that of the first stage or rank of several."""
    can_decode: bool = True
    """Whether all layers are on its device, so that the instance may get a role that decodes."""
    epoch: int = 0
    """Epoch of the Conductor with which this life of the instance was registered before; 0: with none.

    The same Conductor refuses it: a break of the connection may have swallowed orders.
    """
    held: list[Held] = []
    """Requests of that Conductor with which the instance goes on, unless it is told to stop."""
    num_connections: Count = 1
    """Connections of the worker to Conductors so far. A registration that is repeated over another connection
    is refused, too."""
    heads: HeadsSupport = HeadsSupport()
    newest_version: int | None = None
    """Newest version that the worker speaks; None: the oldest one."""
    least_chunk_tokens: Count = 0
    """Fewest tokens of a prompt that an iteration computes beside other requests, whatever TBT SLOs they
    have; 0: as few as these demand."""

    @property
    def versions(self) -> Versions:
        """Versions that the worker speaks."""
        return Versions.named(self.oldest_version, self.newest_version)


class MixedIterations(msgspec.Struct, frozen=True):
    """Totals of the iterations that carried chunks of prompts."""

    num_iterations: Count = 0
    num_tokens: Count = 0
    """Drawn tokens."""
    forward_s: Seconds = 0.0
    num_prompt_tokens: Count = 0


class DecodeStats(msgspec.Struct, frozen=True):
    """Totals of an instance's decoding in this session.

    `forward_s` is the time of forward passes, draws included; `host_s` the processor time of planning and
    sending, mostly beside the passes; `bubble_s` the time in which the device waited between two iterations;
    `pause_s` the time of pauses for prompts that are prefilled.
    """

    num_iterations: Count = 0
    num_tokens: Count = 0
    forward_s: Seconds = 0.0
    host_s: Seconds = 0.0
    bubble_s: Seconds = 0.0
    pause_s: Seconds = 0.0
    num_preemptions: dict[str, Count] = {}
    """Preemptions by the place of the KVCache meanwhile (`PREEMPTED_TO`)."""
    num_refusals: Count = 0
    num_sealed_blocks: Count = 0
    """Blocks that were filled while decoding, and can be found now."""
    num_unsealed: Count = 0
    """Sequences whose blocks found no room in the pool."""
    num_inlined: Count = 0
    """Prompts that the instance computed itself."""
    num_not_inlined: Count = 0
    mixed: MixedIterations = MixedIterations()
    """The iterations among these that carried chunks of prompts."""


class DecodeLoad(msgspec.Struct, frozen=True):
    """The load of a decode instance, now and later."""

    num_requests: Count = 0
    """Requests that it was given and that have not ended."""
    num_awaiting_turn: Count = 0
    """Requests among these that are prefilled and wait because of the batch's predicted TBT."""
    tbt_s: Seconds | None = None
    """Predicted TBT of all of them, sharing the batch's slots; None while too little is known."""
    num_prompt_tokens_left: Count = 0
    """Tokens of inlined prompts that are still to be computed."""
    prompt_token_s: Seconds = 0.0
    """Seconds that a prompt token adds to an iteration, as learned; 0 while unknown. Nothing reads it, and it
    goes with protocol 27."""


class Joining(msgspec.Struct, frozen=True):
    """A request's progress into the batch: KVCache arrived (`arrival_s`), joined (`joining_s`); see
    `Finished`."""

    ref: Ref
    arrival_s: Span | None
    joining_s: Span | None


TO_POOL, TO_HOST = "pool", "host"
PREEMPTED_TO = (TO_POOL, TO_HOST)


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """A worker is alive, and reports its load. Answered by `HeartbeatAck`."""

    num_running: Count
    num_waiting: Count
    num_free_device_pages: Count
    pools: dict[str, PoolStats]
    """Pool counters by the messengers' names: one, or one of each stage or rank."""
    num_prefill_tokens: dict[str, Count] = {}
    """Prompt tokens of finished prefills by the source of their KVCache (`PREFILL_SOURCES`)."""
    prefill_s: Seconds = 0.0
    """Seconds of forward passes over prompts, inlined ones left out."""
    decode: DecodeStats = DecodeStats()
    decode_load: DecodeLoad = DecodeLoad()
    joining: list[Joining] = []
    """Progress since the last heartbeat, in order."""
    heads: HeadsPlace = HeadsPlace()
    moves: MovesStats = MovesStats()


class Returning(msgspec.Struct, tag=True, frozen=True):
    """The first message of a restarted worker, before it loads its model. Answered by `ReturnNoted`.

    `Register` follows when the instance serves again. `failed_in` names the requests in whose pass the
    previous process failed; empty if it was killed, or failed outside a pass; None if it was in a pass of
    unknown requests.
    """

    instance: str
    incarnation: int
    failed_in: list[Ref] | None


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The worker stops now: its requests are to be placed on others. Needs no answer."""


class Retire(msgspec.Struct, tag=True, frozen=True):
    """The worker wants to drain and then end. Answered by `Retired` when no request is left."""


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """The decode instance has pages; prefill may start and write to `grant`."""

    ref: Ref
    grant: Grant


class Prefilled(msgspec.Struct, tag=True, frozen=True):
    """Prefill has ended. `first_token` is the first token of the output.

    From a prefill instance: it has stored all layers and sends them. From a decode instance that computes the
    prompt itself: the token has been drawn and goes to the front.
    """

    ref: Ref
    first_token: TokenId
    num_cached_tokens: Count
    first_logprobs: TokenLogprobs | None = None


class Finished(msgspec.Struct, tag=True, frozen=True):
    """The decode instance has sent the last token to the front.

    `arrival_s` is the time in which only the KVCache was lacking, `joining_s` the other time from the order
    to decode until the request joined the batch. Both are None for a request that needed neither.
    """

    ref: Ref
    finish_reason: FinishReason
    num_output_tokens: Count
    arrival_s: Span | None = None
    joining_s: Span | None = None


class DecodeRefused(msgspec.Struct, tag="Refused", frozen=True):
    """The decode instance refuses a request with which a token would take longer than the TBT SLO.

    Sent only in answer to `Decode`, before the first token has left, when the request may not wait any
    longer. `batch_size` is the number of requests of the prediction, this one included, with a slot or
    without; more may wait for their turn.
    """

    ref: Ref
    reason: str
    batch_size: Count
    predicted_tbt_s: Seconds


class WorkFailed(msgspec.Struct, tag=True, frozen=True):
    """An attempt has failed here. `retryable`: another attempt may succeed. `is_refused`: none can, as this
    request asks for what the instance does not serve.

    From the destination of a migration: the request stays where it is.
    """

    ref: Ref
    reason: str
    retryable: bool
    is_refused: bool = False


# -- Conductor -> worker ----------------------------------------------------------------------------


class Registered(msgspec.Struct, tag=True, frozen=True):
    """The instance is part of the cluster of the Conductor with this epoch."""

    epoch: int
    version: int = 27
    """Version that both speak; a Conductor of release 27 does not say so."""


class ReturnNoted(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Returning`."""


class RegisterRefused(msgspec.Struct, tag=True, frozen=True):
    """The instance or front does not fit this cluster: it ends with `message`, or may try again if
    `retryable`."""

    message: str
    retryable: bool = False


class Retired(msgspec.Struct, tag=True, frozen=True):
    """No request is left on the worker: it may end."""

    is_for_good: bool
    """Whether an operator has drained the instance, so that its supervisor must not start it again."""


class HeartbeatAck(msgspec.Struct, tag=True, frozen=True):
    """The Conductor with this epoch is alive. A worker that is not `known` must register again."""

    known: bool
    epoch: int


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Order to a decode instance: reserve pages for a prompt and grant the missing ones.

    `tbt_slo_s` limits the time between tokens; with `may_refuse` the instance may refuse a request that would
    miss it when prefill has ended (not if its answer has begun). `shares_cores`: the prompt is prefilled on
    cores that this instance uses too. `alone`: the request is a suspect, and shares its first pass with none.
    `inline`: the decode instance computes the prompt itself, and needs no prefill.
    """

    ref: Ref
    request: Request
    tbt_slo_s: float | None = None
    may_refuse: bool = True
    shares_cores: bool = False
    alone: bool = False
    inline: bool = False


class Prefill(msgspec.Struct, tag=True, frozen=True):
    """Order to a prefill instance: compute the missing blocks and stream the granted ones to the decode side.

    `time_left_s` is the time until the first token is due (TTFT SLO); None: no deadline. `prefix_source` is
    where missing blocks may be fetched from; blocks that it turns out not to have are computed.
    `num_reusable_blocks` are believed to need no computation. `alone`: the request is a suspect, and shares
    no pass.
    """

    ref: Ref
    request: Request
    grant: Grant
    time_left_s: float | None = None
    prefix_source: PrefixSource | None = None
    num_reusable_blocks: Count = 0
    alone: bool = False


class Decode(msgspec.Struct, tag=True, frozen=True):
    """Order to a decode instance: prefill is done.

    Send the first token, decode when the KVCache is there; or refuse.

    `time_left_s` is how long the request may wait for its turn, until the first token is due. None: not at
    all.
    """

    ref: Ref
    first_token: int
    num_cached_tokens: int
    first_logprobs: TokenLogprobs | None = None
    time_left_s: float | None = None


class SwitchRole(msgspec.Struct, tag=True, frozen=True):
    """Tell a worker its role from now on. It has no requests of its earlier role. Needs no answer."""

    role: Role


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop an attempt, whatever its step, and release everything. Needs no answer."""

    ref: Ref


FromWorker = (
    Register
    | Returning
    | Heartbeat
    | Leave
    | Retire
    | Reserved
    | Prefilled
    | Finished
    | DecodeRefused
    | WorkFailed
    | FromMigration
)
ToWorker = (
    Registered
    | RegisterRefused
    | ReturnNoted
    | HeartbeatAck
    | Retired
    | Reserve
    | Prefill
    | Decode
    | MigrationOrder
    | PlaceHeads
    | SwitchRole
    | Abort
    | BlockOrder
)
