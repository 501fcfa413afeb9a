"""What workers and the Conductor say to each other over ZeroMQ. `mooncake.messages.fronts` has what fronts
do.

All are msgspec structs, sent as one msgpack frame each; the struct's name is its tag. Work is named by
a `Ref` (the Conductor's epoch, the request, the attempt), and a worker's socket identity carries its
incarnation, so whoever is late can be told from whoever is current. `docs/request-path.md` shows the
order in which a request sends them.

Owns: this vocabulary, who may say what to whom. Does not know: sockets.
"""

from enum import StrEnum

import msgspec

from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Capacity, Grant, PoolShard, PoolStats
from mooncake.messages.quantities import Count, Seconds, Span, TokenId
from mooncake.messages.requests import FinishReason, Ref, Request, TokenLogprobs

PROTOCOL_VERSION = 14


class Role(StrEnum):
    """What an instance does now. A state, not a kind: every worker can do both."""

    PREFILL = "prefill"
    DECODE = "decode"


class InstanceState(StrEnum):
    """Whether an instance is given work."""

    SERVING = "serving"
    DRAINING = "draining"
    """it is given nothing more; what it runs ends there"""
    RETIRING = "retiring"
    """the same, and then it ends"""
    RETIRED = "retired"
    """it has nothing left, and has been told so"""


# -- worker -> Conductor ----------------------------------------------------------------------------


class Register(msgspec.Struct, tag=True, frozen=True):
    """First message of a worker's connection. Answered by `Registered` or `RegisterRefused`."""

    protocol_version: int
    instance: str
    incarnation: int
    role: Role
    fingerprint: str
    layout: KVLayout
    shards: tuple[PoolShard, ...]
    """of the instance's part of the pool: one for each stage of a prefill pipeline"""
    capacity: Capacity
    engine: str
    """what computes: a device, and on CPUs the kernels"""
    idle_cores: frozenset[Count] = frozenset()
    """those of its host on which it computes as long as others leave them idle"""


class DecodeStats(msgspec.Struct, frozen=True):
    """What an instance's decoding has done in this session: totals.

    `host_s`: processor time of planning and of sending tokens off, mostly beside the forward passes;
    `bubble_s`: in which the device waited between two iterations of a batch; `pause_s`: in which that was
    left to prompts that are prefilled; `forward_s`: of the passes, draws included.
    """

    num_iterations: Count = 0
    num_tokens: Count = 0
    forward_s: Seconds = 0.0
    host_s: Seconds = 0.0
    bubble_s: Seconds = 0.0
    pause_s: Seconds = 0.0
    num_preemptions: dict[str, Count] = {}
    """by where the KVCache waited: `PREEMPTED_TO`"""
    num_refusals: Count = 0
    num_sealed_blocks: Count = 0
    """filled while decoding, and to be found now"""
    num_unsealed: Count = 0
    """sequences whose blocks found no room in the pool"""
    num_inlined: Count = 0
    """prompts computed here"""
    num_not_inlined: Count = 0


class DecodeLoad(msgspec.Struct, frozen=True):
    """What an instance has to decode now and later."""

    num_requests: Count = 0
    """all that it has been given and that have not ended"""
    num_awaiting_turn: Count = 0
    """of these, those that are prefilled, and kept out of the batch by its predicted TBT"""
    tbt_s: Seconds | None = None
    """predicted for all of them in one batch; None while too little is known"""


class Joining(msgspec.Struct, frozen=True):
    """How far a request has come on its way into the batch: its KVCache has arrived (`arrival_s`), and it has
    joined (`joining_s`). Both as in `Finished`, None until then."""

    ref: Ref
    arrival_s: Span | None
    joining_s: Span | None


TO_POOL, TO_HOST = "pool", "host"
PREEMPTED_TO = (TO_POOL, TO_HOST)


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """I am alive, and this is my load. Answered by `HeartbeatAck`."""

    num_running: Count
    num_waiting: Count
    num_free_device_pages: Count
    pools: dict[str, PoolStats]
    """of its messenger, or of the messengers of all its stages, by their names"""
    num_prefill_tokens: dict[str, Count] = {}
    """prompt tokens of finished prefills by where their KVCache came from: `PREFILL_SOURCES`"""
    decode: DecodeStats = DecodeStats()
    decode_load: DecodeLoad = DecodeLoad()
    joining: list[Joining] = []
    """what has changed since the last heartbeat, each time in order"""


class Returning(msgspec.Struct, tag=True, frozen=True):
    """First word of a process of an instance whose life before this one has ended, before it loads its model.
    Answered by `ReturnNoted`; `Register` follows when the instance serves again.

    `incarnation`: of this life. `failed_in`: the work in whose pass the one before failed; empty if it was
    killed, or failed beside its passes; None if it was in a pass, and it is not known whose.
    """

    instance: str
    incarnation: int
    failed_in: list[Ref] | None


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The worker stops now: its work is to be placed elsewhere. Needs no answer."""


class Retire(msgspec.Struct, tag=True, frozen=True):
    """The worker wants to end when what it runs has ended: nothing more is to be placed here. Answered by
    `Retired` when nothing is left."""


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """Decode: the pages are there; prefill may start and write to `grant`.

    `inlined`: the prompt is computed here, nothing more needs to be ordered.
    """

    ref: Ref
    grant: Grant
    inlined: bool = False


class Prefilled(msgspec.Struct, tag=True, frozen=True):
    """Prefill: all layers are stored and on their way; this is the first token."""

    ref: Ref
    first_token: TokenId
    num_cached_tokens: Count
    first_logprobs: TokenLogprobs | None = None


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Decode: the last token has left for the front.

    `arrival_s`: for how long nothing but its KVCache was lacking; `joining_s`: how long else it took from the
    order to decode until it joined the batch. None where it needed neither.
    """

    ref: Ref
    finish_reason: FinishReason
    num_output_tokens: Count
    arrival_s: Span | None = None
    joining_s: Span | None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Decode: with this request in the batch a token is predicted to take longer than the TBT SLO.

    Only in answer to `Decode`, before its first token has left, when it may not wait for its turn any longer.
    `batch_size`: for which that is predicted, this request included; others may wait for their turn besides.
    """

    ref: Ref
    reason: str
    batch_size: Count
    predicted_tbt_s: Seconds


class WorkFailed(msgspec.Struct, tag=True, frozen=True):
    """This attempt cannot go on here. `retryable`: another attempt may succeed."""

    ref: Ref
    reason: str
    retryable: bool


# -- Conductor -> worker ----------------------------------------------------------------------------


class Registered(msgspec.Struct, tag=True, frozen=True):
    """The instance is part of the cluster."""


class ReturnNoted(msgspec.Struct, tag=True, frozen=True):
    """Answers `Returning`."""


class RegisterRefused(msgspec.Struct, tag=True, frozen=True):
    """The instance or front does not fit this cluster; it ends with this message, unless it may try again."""

    message: str
    retryable: bool = False


class Retired(msgspec.Struct, tag=True, frozen=True):
    """Nothing of what was placed here is left: the worker may end."""


class HeartbeatAck(msgspec.Struct, tag=True, frozen=True):
    """The Conductor is alive. `known` is false when it has restarted or given you up: register again."""

    known: bool


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """To decode: reserve pages for this prompt and say which blocks you lack.

    `tbt_slo_s`: how long a token may take. `may_refuse`: if it would take longer when prefill has ended; not
    when its answer has begun.
    `shares_cores`: its prompt is prefilled on cores that this instance uses too. `alone`: its first pass is
    to be shared with no other request, for it may be what ends instances.
    """

    ref: Ref
    request: Request
    tbt_slo_s: float | None = None
    may_refuse: bool = True
    shares_cores: bool = False
    alone: bool = False


class PrefixSource(msgspec.Struct, frozen=True):
    """Where the first `num_blocks` blocks of a prompt are believed to be: in one instance's pool, or in those
    of a group, whose shards together are whole blocks."""

    shards: tuple[PoolShard, ...]
    num_blocks: int


class Prefill(msgspec.Struct, tag=True, frozen=True):
    """To prefill: compute what no pool holds and stream the granted blocks to the decode side.

    `time_left_s`: until the first token is due (TTFT SLO), None if it may take its time. `prefix_source`:
    where blocks may be fetched from that your pool lacks. What it turns out not to have is computed.
    `num_reusable_blocks`: so many are believed to need no computation. `alone`: its passes are to be shared
    with no other request.
    """

    ref: Ref
    request: Request
    grant: Grant
    time_left_s: float | None = None
    prefix_source: PrefixSource | None = None
    num_reusable_blocks: Count = 0
    alone: bool = False


class Decode(msgspec.Struct, tag=True, frozen=True):
    """To decode: prefill is done. Send the first token, go on when the KVCache is there; or refuse.

    `time_left_s`: until the first token is due; for so long it may wait for its turn. None: it may not.
    """

    ref: Ref
    first_token: int
    num_cached_tokens: int
    first_logprobs: TokenLogprobs | None = None
    time_left_s: float | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop this work, whatever its step, and give everything back. Needs no answer."""

    ref: Ref


class Pin(msgspec.Struct, tag=True, frozen=True):
    """Keep these blocks, as far as your pool has them, for `ttl_s` or until `Unpin`. Needs no answer.

    They go after all others, so the work at hand still finds room.
    """

    keys: list[BlockKey]
    ttl_s: float


class Unpin(msgspec.Struct, tag=True, frozen=True):
    """These blocks may be evicted like others again. Needs no answer."""

    keys: list[BlockKey]


class Replicate(msgspec.Struct, tag=True, frozen=True):
    """Fetch those of a prompt's first blocks that your pool lacks, beside the transfers that requests wait
    for, and keep them. Needs no answer: what has not come after `timeout_s` is given up."""

    keys: list[BlockKey]
    shards: tuple[PoolShard, ...]
    """of the instance that has them"""
    timeout_s: float


class DropCopies(msgspec.Struct, tag=True, frozen=True):
    """Others hold these blocks as well and they are hardly asked for: forget those that nobody uses or has
    pinned. Needs no answer."""

    keys: list[BlockKey]


BlockOrder = Pin | Unpin | Replicate | DropCopies
"""what is to become of blocks in an instance's pool"""


FromWorker = (
    Register | Returning | Heartbeat | Leave | Retire | Reserved | Prefilled | Finished | Refused | WorkFailed
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
    | Abort
    | BlockOrder
)
