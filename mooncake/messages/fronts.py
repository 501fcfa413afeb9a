"""What fronts and the Conductor say to each other, and what workers say to fronts; as
`mooncake.messages.workers`.

Owns: this vocabulary, who may say what to whom. Does not know: sockets.
"""

import msgspec

from mooncake.messages.blocks import BlockKey
from mooncake.messages.costs import Costs
from mooncake.messages.quantities import Count, Seconds, TokenId
from mooncake.messages.requests import FinishReason, Ref, Request, TokenLogprobs
from mooncake.messages.workers import InstanceState, RegisterRefused, Role

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
    ttl_s: Seconds


class DropContext(msgspec.Struct, tag=True, frozen=True):
    """The context cache has been deleted. Needs no answer."""

    context_id: str


class FrontHello(msgspec.Struct, tag=True, frozen=True):
    """First message of a front, and its heartbeat. Answered by `ClusterState` or `RegisterRefused`."""

    protocol_version: int
    fingerprint: str


class InFlight(msgspec.Struct, tag=True, frozen=True):
    """With each heartbeat of a front: all that it has submitted and that has not ended for it. What the
    Conductor does not have of that is answered by `Unknown`; what it has beside it ends."""

    request_ids: list[str]


class Unknown(msgspec.Struct, tag=True, frozen=True):
    """The Conductor does not have these requests: a break of the connection has swallowed that they came, or
    how they ended."""

    request_ids: list[str]


class ClusterState(msgspec.Struct, tag=True, frozen=True):
    """What a front must know to answer /ready and to size requests. Also sent after each change.

    `max_sequence_blocks` is the longest prompt and output, in blocks, that some pair of instances can hold,
    or could when there last was a pair; 0 before. `prefill_costs` are the mean of the prefill instances, as
    learned so far; None without one. `known` is false in the answer to a front that the Conductor had not
    heard of, or had given up: it has none of its requests. `num_prefill` and `num_decode` take requests,
    `num_draining` are registered and take none.
    """

    epoch: int
    num_prefill: int
    num_decode: int
    max_sequence_blocks: int
    prefill_costs: Costs | None = None
    known: bool = True
    num_draining: dict[Role, Count] = {}


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
    position: Count
    token_ids: list[TokenId]
    num_cached_tokens: Count
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = []


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """One message per step for all requests of a front."""

    outputs: list[TokenOutput]


FromFront = FrontHello | InFlight | Submit | Continue | Cancel | Drain | KeepContext | DropContext
ToFront = (
    ClusterState
    | RegisterRefused
    | Rejected
    | Failed
    | Interrupted
    | Ended
    | Unknown
    | InstanceDrains
    | Tokens
)
