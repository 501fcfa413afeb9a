"""Every message that crosses a process over ZeroMQ, and the values inside them.

All are msgspec structs, sent as one msgpack frame each; the struct's name is its tag. Work is named by
a `Ref` (the Conductor's epoch, the request, the attempt), and a worker's socket identity carries its
incarnation, so whoever is late can be told from whoever is current. `docs/request-path.md` shows the
order in which a request sends them.

Owns: the wire vocabulary. Does not know: sockets.
"""

from enum import StrEnum

import msgspec

from mooncake.blocks import BlockKey, KVLayout, extended_keys
from mooncake.costs import Costs

PROTOCOL_VERSION = 10


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


class FinishReason(StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at one request under one Conductor. Work of another epoch or attempt is not ours."""

    epoch: int
    request_id: str
    attempt: int


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 do not filter.

    `seed` together with the token's position decides every draw, so a token depends neither on the
    worker that draws it nor on its batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    min_tokens: int = 0
    """stop tokens are not drawn before"""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """the output contains none of these token ids in this order"""
    grammar: str = ""
    """the whole output is one of its texts (`mooncake.grammar`); empty: it may be any"""
    num_logprobs: int | None = None
    """report the logprobs of each drawn token and of so many likeliest ones; None: of none"""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logarithms of the probabilities that the model gave to a drawn token and to the likeliest in its place:
    of the logits as they came, whatever the request wants changed of them."""

    logprob: float
    top_token_ids: list[int]
    """descending"""
    top_logprobs: list[float]


class Request(msgspec.Struct, frozen=True):
    """A prompt on its way through the cluster.

    `block_keys` name the full blocks of `token_ids`; tokens behind the last full block have no key.
    `reply_to` is the ZeroMQ endpoint of the front that waits for the tokens. `is_salted`: the keys are those
    of one tenant (`cache_salt`), so nobody else is told which tokens they stand for. `root_key` is the parent
    of the first block. Where requests wait for one another, those of a lower `priority` go first.
    """

    request_id: str
    token_ids: list[int]
    block_keys: list[BlockKey]
    sampling: SamplingParams
    reply_to: str
    is_salted: bool = False
    root_key: BlockKey = b""
    priority: int = 0
    slo_class: str = ""
    """whose SLOs it is promised; empty: those of all"""
    tenant: str = ""
    """on whose behalf: tenants share an overloaded cluster fairly"""
    num_output_tokens: int = 0
    """the last so many of `token_ids` were drawn in earlier attempts: this one goes on behind them"""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_output_tokens

    @property
    def output(self) -> list[int]:
        """What earlier attempts have drawn."""
        return self.token_ids[self.num_prompt_tokens :]

    def continued(self, output: list[int], block_size: int) -> "Request":
        """The same, to go on behind `output`. Only for one that has none yet."""
        assert not self.num_output_tokens
        token_ids = self.token_ids + output
        keys = extended_keys(self.block_keys, token_ids, block_size, self.root_key)
        return msgspec.structs.replace(
            self, token_ids=token_ids, block_keys=keys, num_output_tokens=len(output)
        )


class MessengerAddress(msgspec.Struct, frozen=True):
    """Where an instance's messenger listens. `host_id` tells whether two messengers share memory."""

    instance: str
    incarnation: int
    host_id: str
    unix_path: str
    tcp_endpoints: tuple[tuple[str, int], ...]
    """each reaches it; several are used together"""
    event_endpoints: tuple[str, str] = ("", "")
    """where KV events are published, and where replays and snapshots are asked for"""


class PoolShard(msgspec.Struct, frozen=True):
    """A messenger, and which layers and heads of a model's blocks its pool holds."""

    messenger: MessengerAddress
    layout: KVLayout


class GrantedPage(msgspec.Struct, frozen=True, array_like=True):
    """One page of the granting pool that the prompt's block `block_index` may be written to."""

    block_index: int
    page: int
    generation: int


class Grant(msgspec.Struct, frozen=True):
    """The decode side's answer to a reservation: the blocks it lacks, and where they may be written.

    Only these travel. A grant ends when all of its pages have arrived or it is revoked. A tensor-parallel
    group grants once a rank: `others` are those of the ranks behind the first, each for its own KV heads.
    """

    grant_id: int
    messenger: MessengerAddress
    pages: list[GrantedPage]
    others: tuple["Grant", ...] = ()


class Capacity(msgspec.Struct, frozen=True):
    """What an instance can hold at all, in pages of one block."""

    num_pool_pages: int
    num_device_pages: int


class Tier(StrEnum):
    """Where in an instance's part of the pool a block is. One block may be in several."""

    DRAM = "dram"
    SSD = "ssd"


COMPUTED, REMOTE = "computed", "remote"
PREFILL_SOURCES = (COMPUTED, *(tier.value for tier in Tier), REMOTE)
"""computed, reused from a tier of the own pool, or fetched from another instance's"""


class TierStats(msgspec.Struct, frozen=True):
    """One tier of an instance's part of the pool, in blocks."""

    num_slots: int
    """blocks that it can hold"""
    num_blocks: int
    num_hits: int
    num_evictions: int
    num_checksum_failures: int
    num_errors: int = 0
    """reads and writes that failed"""
    is_healthy: bool = True


class PeerStats(msgspec.Struct, frozen=True):
    """What is under way between this messenger and another, at this one's request."""

    in_flight_bytes: int
    bandwidth_bytes_per_s: float | None
    """lately, while something was under way; None before the first transfers"""
    num_streams: int
    sent_bytes: dict[str, int] = {}
    """by transport, as the two below: totals since this messenger started"""
    received_bytes: dict[str, int] = {}
    busy_s: dict[str, float] = {}
    """in which something was under way"""


class PoolStats(msgspec.Struct, frozen=True):
    """An instance's part of the pool. Counts are pages (blocks), totals are since its messenger started.

    `integrity` says what is wrong when pages are not each accounted for exactly once, as seen when that was
    last looked at; `num_orphaned` is the number of such pages.
    """

    num_pages: int
    num_free: int
    num_reserved: int
    num_sealed: int
    num_quarantined: int
    num_used: int
    num_reservations: int
    num_leases: int
    num_pins: int
    block_bytes: int
    eviction_policy: str
    tiers: dict[Tier, TierStats]
    num_misses: dict[str, int]
    """by reason"""
    num_dropped: int
    num_removed: int
    num_demotions: int
    num_promotions: int
    num_expired_leases: int
    num_checksum_failures: int
    """blocks that arrived damaged from other messengers"""
    num_orphaned: int
    sent_bytes: dict[str, int]
    received_bytes: dict[str, int]
    num_strangers: int = 0
    """connections from whoever has not the cluster's key"""
    peers: dict[str, PeerStats] = {}
    """by instance"""
    integrity: str | None = None


# -- KV events --------------------------------------------------------------------------------------
#
# Of one instance's messenger to whoever mirrors its pool: batches on a PUB socket, numbered from 0 in each
# incarnation, and a ROUTER socket for what a subscriber lacks. To mirror: subscribe, ask for a snapshot, then
# apply every batch behind it, in order and once. After a gap ask for a replay; when that is gone, or the
# incarnation is another one, forget everything and ask for a snapshot.


class KVStored(msgspec.Struct, tag=True, frozen=True):
    """These blocks can be found in `tier` now."""

    tier: Tier
    keys: list[BlockKey]


class KVRemoved(msgspec.Struct, tag=True, frozen=True):
    """These blocks are no longer in `tier`; other tiers may still have them."""

    tier: Tier
    keys: list[BlockKey]


class KVCleared(msgspec.Struct, tag=True, frozen=True):
    """All that was stored before, in every tier, is gone. Batch 0 begins with it."""


KVEvent = KVStored | KVRemoved | KVCleared


class KVEvents(msgspec.Struct, tag=True, frozen=True):
    """One batch: what changed in an instance's part of the pool, oldest first."""

    instance: str
    incarnation: int
    sequence: int
    events: list[KVEvent]


class ReplayEvents(msgspec.Struct, tag=True, frozen=True):
    """Answered by every batch from `from_sequence` on and `ReplayDone`, or by `EventsGone`."""

    from_sequence: int


class ReplayDone(msgspec.Struct, tag=True, frozen=True):
    """All batches before `next_sequence` have been sent."""

    instance: str
    incarnation: int
    next_sequence: int


class EventsGone(msgspec.Struct, tag=True, frozen=True):
    """Only the batches `[oldest_sequence, next_sequence)` can be replayed: ask for a snapshot."""

    instance: str
    incarnation: int
    oldest_sequence: int
    next_sequence: int


class GetSnapshot(msgspec.Struct, tag=True, frozen=True):
    """Answered by the parts of a snapshot. Who asks again before the last part gets a newer one instead."""


class KVSnapshot(msgspec.Struct, tag=True, frozen=True):
    """A part of the pool's contents as they were after batch `sequence`.

    Every key of every tier is in exactly one part; all parts carry the same `sequence`, another one begins
    a new snapshot. An empty pool is one part without keys.
    """

    instance: str
    incarnation: int
    sequence: int
    tier: Tier
    keys: list[BlockKey]
    is_last: bool


ToKVEvents = ReplayEvents | GetSnapshot
FromKVEvents = KVEvents | ReplayDone | EventsGone | KVSnapshot


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
    idle_cores: frozenset[int] = frozenset()
    """those of its host on which it computes as long as others leave them idle"""


class DecodeStats(msgspec.Struct, frozen=True):
    """What an instance's decoding has done in this session: totals.

    `host_s`: processor time of planning and of sending tokens off, mostly beside the forward passes;
    `bubble_s`: in which the device waited between two iterations of a batch; `pause_s`: in which that was
    left to prompts that are prefilled; `forward_s`: of the passes, draws included.
    """

    num_iterations: int = 0
    num_tokens: int = 0
    forward_s: float = 0.0
    host_s: float = 0.0
    bubble_s: float = 0.0
    pause_s: float = 0.0
    num_preemptions: dict[str, int] = {}
    """by where the KVCache waited: `PREEMPTED_TO`"""
    num_refusals: int = 0
    num_sealed_blocks: int = 0
    """filled while decoding, and to be found now"""
    num_unsealed: int = 0
    """sequences whose blocks found no room in the pool"""
    num_inlined: int = 0
    """prompts computed here"""
    num_not_inlined: int = 0


TO_POOL, TO_HOST = "pool", "host"
PREEMPTED_TO = (TO_POOL, TO_HOST)


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """I am alive, and this is my load. Answered by `HeartbeatAck`."""

    num_running: int
    num_waiting: int
    num_free_device_pages: int
    pools: dict[str, PoolStats]
    """of its messenger, or of the messengers of all its stages, by their names"""
    num_prefill_tokens: dict[str, int] = {}
    """prompt tokens of finished prefills by where their KVCache came from: `PREFILL_SOURCES`"""
    decode: DecodeStats = DecodeStats()


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
    first_token: int
    num_cached_tokens: int
    first_logprobs: TokenLogprobs | None = None


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Decode: the last token has left for the front.

    `arrival_s`: from the order to decode until its KVCache was there; `joining_s`: from then until it joined
    the batch. None where it needed neither.
    """

    ref: Ref
    finish_reason: FinishReason
    num_output_tokens: int
    arrival_s: float | None = None
    joining_s: float | None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Decode: with this request in the batch a token is predicted to take longer than the TBT SLO.

    Only in answer to `Decode`, before its first token has left.
    """

    ref: Ref
    reason: str
    predicted_tbt_s: float


class WorkFailed(msgspec.Struct, tag=True, frozen=True):
    """This attempt cannot go on here. `retryable`: another attempt may succeed."""

    ref: Ref
    reason: str
    retryable: bool


# -- Conductor -> worker ----------------------------------------------------------------------------


class Registered(msgspec.Struct, tag=True, frozen=True):
    """The instance is part of the cluster."""


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
    `shares_cores`: its prompt is prefilled on cores that this instance uses too.
    """

    ref: Ref
    request: Request
    tbt_slo_s: float | None = None
    may_refuse: bool = True
    shares_cores: bool = False


class PrefixSource(msgspec.Struct, frozen=True):
    """Where the first `num_blocks` blocks of a prompt are believed to be: in one instance's pool, or in those
    of a group, whose shards together are whole blocks."""

    shards: tuple[PoolShard, ...]
    num_blocks: int


class Prefill(msgspec.Struct, tag=True, frozen=True):
    """To prefill: compute what no pool holds and stream the granted blocks to the decode side.

    `time_left_s`: until the first token is due (TTFT SLO), None if it may take its time. `prefix_source`:
    where blocks may be fetched from that your pool lacks. What it turns out not to have is computed.
    """

    ref: Ref
    request: Request
    grant: Grant
    time_left_s: float | None = None
    prefix_source: PrefixSource | None = None


class Decode(msgspec.Struct, tag=True, frozen=True):
    """To decode: prefill is done. Send the first token, go on when the KVCache is there; or refuse."""

    ref: Ref
    first_token: int
    num_cached_tokens: int
    first_logprobs: TokenLogprobs | None = None


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


# -- front <-> Conductor ----------------------------------------------------------------------------


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A client's request. Answered by tokens from a worker and `Ended`, or by `Rejected`, or by `Failed`."""

    request: Request


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """The client has gone, or has all that it wants. Nothing more is sent for this request."""

    request_id: str


class Continue(msgspec.Struct, tag=True, frozen=True):
    """Answers `Interrupted`: the request with what has come of its output, to go on behind that."""

    request: Request


class Drain(msgspec.Struct, tag=True, frozen=True):
    """An instance is to finish what it runs and to be given nothing more; if not `is_wanted`, to serve again.
    Answered by `InstanceDrains`."""

    instance: str
    is_wanted: bool = True


class KeepContext(msgspec.Struct, tag=True, frozen=True):
    """Keep the blocks of a context cache for `ttl_s`, wherever they are or come to be. Needs no answer.

    Said of the same `context_id` again it replaces what was said before.
    """

    context_id: str
    keys: list[BlockKey]
    ttl_s: float


class DropContext(msgspec.Struct, tag=True, frozen=True):
    """The context cache has been deleted. Needs no answer."""

    context_id: str


class FrontHello(msgspec.Struct, tag=True, frozen=True):
    """First message of a front, and its heartbeat. Answered by `ClusterState` or `RegisterRefused`."""

    protocol_version: int
    fingerprint: str


class ClusterState(msgspec.Struct, tag=True, frozen=True):
    """What a front must know to answer /ready and to size requests. Also sent after each change.

    `max_sequence_blocks` is the longest prompt and output, in blocks, that some pair of instances can hold,
    or could when there last was a pair; 0 before. `prefill_costs` are the mean of the prefill instances, as
    learned so far; None without one.
    """

    epoch: int
    num_prefill: int
    num_decode: int
    max_sequence_blocks: int
    prefill_costs: Costs | None = None


class InstanceDrains(msgspec.Struct, tag=True, frozen=True):
    """Answers `Drain`: what the instance does now, None if nobody has this name; how many requests it has."""

    instance: str
    state: InstanceState | None
    num_requests: int


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """Refused before any token. `status` is the HTTP status; `retry_after_s` is set for 429 and 503."""

    request_id: str
    status: int
    message: str
    retry_after_s: float | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An accepted request could not be finished."""

    request_id: str
    message: str


class Interrupted(msgspec.Struct, tag=True, frozen=True):
    """Who decoded this request is lost. Answered by `Continue`, or by `Cancel` if nothing more is wanted.

    Asked again until it is answered."""

    request_id: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The decode instance has sent all `num_output_tokens`. A front that lacks some has lost them."""

    request_id: str
    num_output_tokens: int


# -- worker -> front --------------------------------------------------------------------------------


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request from one step. `position` is the index of the first one in the output.

    `logprobs` are those of each token, or none if the request has not asked for them.
    """

    ref: Ref
    position: int
    token_ids: list[int]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = []


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """One message per step for all requests of a front."""

    outputs: list[TokenOutput]


FromWorker = Register | Heartbeat | Leave | Retire | Reserved | Prefilled | Finished | Refused | WorkFailed
FromFront = FrontHello | Submit | Continue | Cancel | Drain | KeepContext | DropContext
ToConductor = FromWorker | FromFront
ToWorker = (
    Registered | RegisterRefused | HeartbeatAck | Retired | Reserve | Prefill | Decode | Abort | BlockOrder
)
ToFront = ClusterState | RegisterRefused | Rejected | Failed | Interrupted | Ended | InstanceDrains | Tokens
