"""The messages between fronts and the Conductor, and from workers to fronts.

Messages that fronts pass on for operators are in `mooncake.messages.operators`.

Owns: this vocabulary, the senders and receivers of each message. Does not know: sockets.
"""

import msgspec

from mooncake.messages.blocks import BlockKey
from mooncake.messages.costs import Costs
from mooncake.messages.operators import OperatorAnswer, OperatorOrder
from mooncake.messages.quantities import Count, PositiveCount, Seconds, TokenId
from mooncake.messages.requests import FinishReason, Ref, Request, TokenLogprobs
from mooncake.messages.workers import RegisterRefused, Role
from mooncake.versions import Versions

# -- front <-> Conductor ----------------------------------------------------------------------------


class QuotaClaim(msgspec.Struct, frozen=True):
    """A tenant's limits in the whole cluster, with what an answer takes of them. A limit of None is none.

    `num_running` are the tenant's choices that run at this front, those of this answer included. `num_tokens`
    are those of the answer's prompts, each counted once.
    """

    tokens_per_minute: PositiveCount | None
    max_concurrent: Count | None
    num_running: Count
    num_tokens: Count


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Submit a request. Answered by tokens from a worker and `Ended`, or by `Rejected`, or by `Failed`.

    `claim` comes with the first choice of an answer, for all of them, if the tenant has limits.
    """

    request: Request
    claim: QuotaClaim | None = None


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Take over a request that an earlier Conductor had, behind the output that the front has.

    Sent once to each new Conductor, for every request that has not ended for the front. Answered as `Submit`.
    A request that the new Conductor has already is not changed. `waited_s` is the time since its submission.
    """

    request: Request
    waited_s: Seconds


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """End a request whose client has gone, or has all that it wants. Nothing more is sent for it.

    `num_output_tokens` have come by now.
    """

    request_id: str
    num_output_tokens: Count = 0


class Continue(msgspec.Struct, tag=True, frozen=True):
    """Run a request again behind the output that the front has.

    The answer to `Interrupted`. A front also sends it unasked if tokens in the middle of the output are
    missing: then `attempt` is the latest attempt whose tokens have come, and the message is void if the
    request has another attempt by now. It is repeated until the tokens come.
    """

    request: Request
    attempt: Count | None = None


class KeepContext(msgspec.Struct, tag=True, frozen=True):
    """Keep the blocks of a context cache for `ttl_s`, on any instance that has or gets them. Needs no answer.

    A later message with the same `context_id` replaces this one.
    """

    context_id: str
    keys: list[BlockKey]
    ttl_s: Seconds


class DropContext(msgspec.Struct, tag=True, frozen=True):
    """Forget a context cache that has been deleted. Needs no answer."""

    context_id: str


class FrontHello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a front, and its heartbeat. Answered by `ClusterState` or `RegisterRefused`."""

    oldest_version: int = msgspec.field(name="protocol_version")
    """Oldest version of these messages that the front speaks; release 27 knows it by its other name."""
    fingerprint: str
    epoch: int = 0
    """Epoch of the Conductor whose state the front has; 0 before the first one."""
    num_instances: Count = 0
    """`ClusterState.num_instances` in that state."""
    newest_version: int | None = None
    """Newest version that the front speaks; None: the oldest one."""

    @property
    def versions(self) -> Versions:
        """Versions that the front speaks."""
        return Versions.named(self.oldest_version, self.newest_version)


class InFlight(msgspec.Struct, tag=True, frozen=True):
    """All requests that a front has submitted and that have not ended for it, with each heartbeat.

    Requests that the Conductor does not have are answered by `Unknown`; requests that only the Conductor has
    are ended.
    """

    request_ids: list[str]


class Unknown(msgspec.Struct, tag=True, frozen=True):
    """The Conductor does not have these requests: a break of the connection has lost their beginning or
    end."""

    request_ids: list[str]


class ClusterState(msgspec.Struct, tag=True, frozen=True):
    """The state that a front needs for /ready and for limits of requests. Also sent after each change.

    `max_sequence_blocks` is the longest prompt and output, in blocks, that some pair of instances can hold,
    or could when there last was a pair; 0 before. `prefill_costs` are the mean of the prefill instances, as
    learned so far; None without one. `known` is false for a front that the Conductor did not know, or had
    given up: it has none of the front's requests. `num_prefill` and `num_decode` instances take requests,
    `num_draining` are registered and take none, `num_instances` are
    registered, or expected back.
    """

    epoch: int
    num_prefill: int
    num_decode: int
    max_sequence_blocks: int
    prefill_costs: Costs | None = None
    known: bool = True
    num_draining: dict[Role, Count] = {}
    num_instances: Count = 0
    version: int = 27
    """Version that both speak; a Conductor of release 27 does not say so."""


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """A request is refused before any token.

    `reason` names the limit, SLO or state, as metrics do; `status` is the HTTP status; `retry_after_s` is set
    for 429 and 503.
    """

    request_id: str
    reason: str
    status: int
    message: str
    retry_after_s: float | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An accepted request could not be finished.

    `may_retry`: the request is not the cause, and may be sent again. `is_refused`: it asks for what is not
    served.
    """

    request_id: str
    message: str
    may_retry: bool = False
    is_refused: bool = False


class Interrupted(msgspec.Struct, tag=True, frozen=True):
    """A request whose output may have begun needs another pair, as its own has failed or is lost.

    The front answers with `Continue`, or with `Cancel` if nothing more is wanted. The Conductor repeats the
    message until it is answered.
    """

    request_id: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The decode instance has sent all `num_output_tokens`. A front that lacks some has lost them."""

    request_id: str
    num_output_tokens: int


# -- worker -> front --------------------------------------------------------------------------------


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request from one iteration. `position` is the index of the first of them in the output.

    `logprobs` has one entry a token, or none if the request does not want them.
    """

    ref: Ref
    position: Count
    token_ids: list[TokenId]
    num_cached_tokens: Count
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = []


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """The tokens of one iteration for all requests of a front."""

    outputs: list[TokenOutput]


FromFront = (
    FrontHello | InFlight | Submit | Resume | Continue | Cancel | KeepContext | DropContext | OperatorOrder
)
ToFront = (
    ClusterState
    | RegisterRefused
    | Rejected
    | Failed
    | Interrupted
    | Ended
    | Unknown
    | OperatorAnswer
    | Tokens
)
