"""The messages between workers and the Conductor, over ZeroMQ.

All messages are msgspec structs, sent as one msgpack frame each; the struct's name is its tag. Work is named
by a `Ref` (the Conductor's epoch, the request, the attempt), and a worker's socket identity carries its
incarnation, so late messages are recognised. `docs/request-path.md` shows their order in a request's life.
Fronts have messages of their own (`mooncake.messages.fronts`).

Owns: this vocabulary, the senders and receivers of each message. Does not know: sockets, what heartbeats say
(`mooncake.messages.heartbeats`).
"""

from enum import StrEnum

import msgspec

from mooncake.messages.block_orders import BlockOrder
from mooncake.messages.blocks import KVLayout
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import FromMigration, MigrationOrder, ModulesSupport, PlaceModules
from mooncake.messages.pools import Capacity, Grant, PoolShard, PrefixSource
from mooncake.messages.quantities import Count, Seconds, Span, TokenId
from mooncake.messages.requests import FinishReason, Held, Ref, Request, TokenLogprobs
from mooncake.versions import Versions

PROTOCOL_VERSION = 28
"""The version of the messages among Conductor, fronts, workers and stages, and of KV events.

The number is that of the release before, or one more if any of the messages has changed since
(`mooncake.versions`).
"""
SPOKEN = Versions(27, PROTOCOL_VERSION)
"""The versions that Conductor, fronts and workers speak. Parts of one instance have one version."""


class Role(StrEnum):
    """The role of an instance. A role is a state, not a kind: an instance may get another role.

    `Register.can_decode` says whether an instance may get a role that decodes.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """The instance decodes, and computes the prompts of its own requests: coupled chunked prefill."""


STAGES = (Role.PREFILL, Role.DECODE)
"""The roles that a request needs, of two instances or of one instance with the role BOTH."""


class InstanceState(StrEnum):
    """The states of an instance. Only a SERVING instance gets requests."""

    SERVING = "serving"
    SWITCHING = "switching"
    """The instance gets no new requests, and changes its role when it has none left."""
    DRAINING = "draining"
    """The instance gets no new requests, by order of an operator, who can call it back.

    When nothing is left there, it retires, or stays without requests, as the order says.
    """
    RETIRING = "retiring"
    """The instance drains because its worker has been told to end."""
    RETIRED = "retired"
    """The instance has no request left, and has been told that it may end."""


# -- worker -> Conductor ----------------------------------------------------------------------------


class Register(msgspec.Struct, tag=True, frozen=True):
    """The first message of a worker's connection. Answered by `Registered` or `RegisterRefused`."""

    oldest_version: int = msgspec.field(name="protocol_version")
    """The oldest version that the worker speaks.

    On the wire the field keeps the name that release 27 knows.
    """
    instance: str
    incarnation: int
    role: Role
    fingerprint: str
    layout: KVLayout
    shards: tuple[PoolShard, ...]
    """The shards of the instance's part of the pool: one for each stage or rank."""
    capacity: Capacity
    engine: str
    """The device and its kernels as text."""
    idle_cores: frozenset[Count] = frozenset()
    """The CPU cores of its host that the instance uses only while other processes leave them idle."""
    device: str = ""
    """The name of the GPU or processor; with several stages or ranks, of the first one."""
    can_decode: bool = True
    """Whether all layers are on the instance's device, so that it may get a role that decodes."""
    epoch: int = 0
    """The epoch of the Conductor with which this life of the instance was registered before; 0 for none.

    The same Conductor refuses the registration, as a break of the connection may have swallowed orders.
    """
    held: list[Held] = []
    """The requests that the Conductor of this `epoch` has ordered, and with which the instance goes on.

    The instance goes on with a request unless the Conductor that it registers with stops the request.
    """
    num_connections: Count = 1
    """The number of the worker's connections to Conductors so far.

    A registration repeated over another connection is refused, too.
    """
    modules: ModulesSupport = ModulesSupport()
    newest_version: int | None = None
    """The newest version that the worker speaks; None: the oldest one."""
    least_chunk_tokens: Count = 0
    """The fewest prompt tokens of an iteration with other requests; 0: as few as their TBT SLOs demand."""
    can_migrate: bool = True
    """Whether requests that are being decoded can migrate from this instance and to this instance."""

    @property
    def versions(self) -> Versions:
        """The versions that the worker speaks."""
        return Versions.named(self.oldest_version, self.newest_version)


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
    """The report that the worker stops now. Needs no answer.

    Its requests are placed on other instances.
    """


class Retire(msgspec.Struct, tag=True, frozen=True):
    """The worker's wish to drain and then end. Answered by `Retired` when no request is left."""


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """The report that the decode instance has pages, so that prefill may start and write to `grant`."""

    ref: Ref
    grant: Grant


class Prefilled(msgspec.Struct, tag=True, frozen=True):
    """The report that prefill has ended. `first_token` is the first token of the output.

    From a prefill instance: all layers are stored and being sent. From a decode instance that inlines the
    prompt: the token has been drawn and goes to the front.
    """

    ref: Ref
    first_token: TokenId
    num_cached_tokens: Count
    first_logprobs: TokenLogprobs | None = None


class Finished(msgspec.Struct, tag=True, frozen=True):
    """The report that the decode instance has sent the last token to the front.

    `arrival_s`: seconds from the request's turn in the double check until its KVCache was in the pool.
    `joining_s`: seconds from the order to decode until the request joined the batch, less `arrival_s`. So a
    wait for the turn is a part of `joining_s`. Both are None for a request that this instance has inlined or
    taken over; `joining_s` is also None if the first token was the last.
    """

    ref: Ref
    finish_reason: FinishReason
    num_output_tokens: Count
    arrival_s: Span | None = None
    joining_s: Span | None = None


class DecodeRefused(msgspec.Struct, tag="Refused", frozen=True):
    """The refusal of a decode instance, as a token would take longer than the TBT SLO with this request.

    Sent only in answer to `Decode`, before the first token has left, when the request may not wait any
    longer. `batch_size` is the number of requests in the prediction: this one and all that the instance has
    accepted, with a slot or without. Further requests may wait for their turn.
    """

    ref: Ref
    reason: str
    batch_size: Count
    predicted_tbt_s: Seconds


class WorkFailed(msgspec.Struct, tag=True, frozen=True):
    """The report that an attempt has failed. `retryable`: another attempt may succeed.

    `is_refused`: no attempt can succeed, as the request asks for something that the instance does not serve.
    `param` is the field of the API that asks for it, or `grammar`, for which several fields can ask; None if
    the field is unknown.

    From the destination of a migration: the request stays at its source, or runs again if the source was
    ordered to hand it over.
    """

    ref: Ref
    reason: str
    retryable: bool
    is_refused: bool = False
    param: str | None = None


# -- Conductor -> worker ----------------------------------------------------------------------------


class Registered(msgspec.Struct, tag=True, frozen=True):
    """The answer that the instance is registered with the Conductor of this epoch."""

    epoch: int
    version: int = 27
    """The version that both sides speak; a Conductor of release 27 does not send it."""


class ReturnNoted(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Returning`."""


class RegisterRefused(msgspec.Struct, tag=True, frozen=True):
    """The refusal of an instance or front that does not fit this cluster.

    Its process ends with `message`, or may retry if `retryable`.
    """

    message: str
    retryable: bool = False


class Retired(msgspec.Struct, tag=True, frozen=True):
    """The answer that no request is left on the worker, so that it may end."""

    is_for_good: bool
    """Whether an operator has drained the instance, so that its supervisor must not start it again."""


class HeartbeatAck(msgspec.Struct, tag=True, frozen=True):
    """The answer to a heartbeat, by the Conductor with this epoch.

    A worker that is not `known` must register again.
    """

    known: bool
    epoch: int


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Order to a decode instance: reserve pages for a prompt and grant the missing ones.

    `tbt_slo_s` limits the time between tokens. With `may_refuse` the instance may refuse the request when
    prefill has ended, if the request would miss this limit and its answer has not begun. `shares_cores`: the
    prompt is being prefilled on cores that this instance uses too. `alone`: the request is a suspect, and
    shares no pass with other requests until the instance has drawn a token of it. `inline`: the decode
    instance computes the prompt itself, and needs no prefill.
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
    the instance from which missing blocks may be fetched; blocks that it turns out not to have are computed.
    `num_reusable_blocks` is the number of leading blocks of the prompt that are believed to need no
    computation. `alone`: the request is a suspect, and shares no pass.
    """

    ref: Ref
    request: Request
    grant: Grant
    time_left_s: float | None = None
    prefix_source: PrefixSource | None = None
    num_reusable_blocks: Count = 0
    alone: bool = False


class Decode(msgspec.Struct, tag=True, frozen=True):
    """Order to a decode instance: prefill is done, so send the first token and decode, or refuse.

    Decoding begins when the KVCache has arrived.

    `time_left_s`: seconds until the first token is due. The request may wait for its turn in the double check
    until then; None if it may not wait.
    """

    ref: Ref
    first_token: int
    num_cached_tokens: int
    first_logprobs: TokenLogprobs | None = None
    time_left_s: float | None = None


class SwitchRole(msgspec.Struct, tag=True, frozen=True):
    """Order to a worker without requests to have this role from now on. Needs no answer."""

    role: Role


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Order to stop an attempt in any step, and to release all that it holds. Needs no answer."""

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
    | PlaceModules
    | SwitchRole
    | Abort
    | BlockOrder
)
