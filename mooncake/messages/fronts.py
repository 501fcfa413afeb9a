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
    """A tenant's limits in the whole cluster, with the amounts that one answer takes.

    A limit of None is no limit.

    `num_running`: the tenant's choices that run at this front, including the choices of this answer.
    `num_tokens`: the tokens of the answer's prompts; a prompt of several choices counts once.
    """

    tokens_per_minute: PositiveCount | None
    max_concurrent: Count | None
    num_running: Count
    num_tokens: Count


class Submit(msgspec.Struct, tag=True, frozen=True):
    """The submission of a request.

    Answered by tokens from a worker and `Ended`, or by `Rejected`, or by `Failed`. Before these, the first
    choice of several is answered by `Accepted`.

    `claim` is the claim of the whole answer, and comes with its first choice; None if the tenant has no
    limits.

    `num_choices` is the number of the answer's choices, in the message of the first choice; 1 in the
    messages of further choices.
    """

    request: Request
    claim: QuotaClaim | None = None
    num_choices: PositiveCount = 1


class Resume(msgspec.Struct, tag=True, frozen=True):
    """The order to take over a request of an earlier Conductor.

    The new Conductor continues the request behind the output that the front has. The order is sent once to
    each new Conductor, for every request that has not ended for the front. Answered as `Submit` is. A request
    that the new Conductor has already is not changed. `waited_s`: seconds since the request was submitted.
    """

    request: Request
    waited_s: Seconds


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """The end of a request whose client has gone, or needs no more output.

    Nothing more is sent for the request. `num_output_tokens`: the number of tokens that have arrived at the
    front.
    """

    request_id: str
    num_output_tokens: Count = 0


class Continue(msgspec.Struct, tag=True, frozen=True):
    """The order to run a request again behind the output that the front has.

    A front sends this order in answer to `Interrupted`. If tokens in the middle of the output are missing,
    the front sends the order unasked, and repeats it until the tokens come. Then `attempt` is the latest
    attempt whose tokens have come, and the Conductor ignores the order if the request has another attempt by
    now.
    """

    request: Request
    attempt: Count | None = None


class KeepContext(msgspec.Struct, tag=True, frozen=True):
    """The order to pin the blocks of a context cache for `ttl_s` seconds. Needs no answer.

    The blocks are pinned on any instance that has them or gets them. A later message with the same
    `context_id` replaces this one.
    """

    context_id: str
    keys: list[BlockKey]
    ttl_s: Seconds


class DropContext(msgspec.Struct, tag=True, frozen=True):
    """The order to forget a context cache that has been deleted. Needs no answer."""

    context_id: str


class FrontHello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a front, and its heartbeat. Answered by `ClusterState` or `RegisterRefused`."""

    oldest_version: int = msgspec.field(name="protocol_version")
    """The oldest version of these messages that the front speaks.

    On the wire the field keeps the name that release 27 knows.
    """
    fingerprint: str
    epoch: int = 0
    """The epoch of the Conductor whose state the front has; 0 before the first one."""
    num_instances: Count = 0
    """The front's value of `ClusterState.num_instances`."""
    newest_version: int | None = None
    """The newest version that the front speaks; None: the oldest one."""

    @property
    def versions(self) -> Versions:
        """The versions that the front speaks."""
        return Versions.named(self.oldest_version, self.newest_version)


class InFlight(msgspec.Struct, tag=True, frozen=True):
    """All requests that a front has in flight, sent with each heartbeat.

    Requests that the Conductor does not have are answered by `Unknown`; requests that only the Conductor has
    are ended.
    """

    request_ids: list[str]


class Unknown(msgspec.Struct, tag=True, frozen=True):
    """The report that the Conductor does not have these requests.

    A break of the connection has lost the message that began or ended each of them.
    """

    request_ids: list[str]


class ClusterState(msgspec.Struct, tag=True, frozen=True):
    """The state of the cluster for /ready and for limits of requests.

    Sent to a front in answer to `FrontHello`, and after each change.
    """

    epoch: int
    """The Conductor's epoch."""
    num_prefill: int
    """Instances that take requests for prefill."""
    num_decode: int
    """Instances that take requests for decode."""
    max_sequence_blocks: int
    """The most blocks of prompt and output that a pair of instances can hold for one request.

    While there is no pair it keeps its last value, which is 0 before the first pair.
    """
    prefill_costs: Costs | None = None
    """The learned mean costs of the prefill instances; None if no instance computes prompts.

    Without prefill instances the mean is taken over the instances that inline prompts.
    """
    known: bool = True
    """Whether the Conductor knew the front, and had not given it up.

    If not, the Conductor has none of the front's requests.
    """
    num_draining: dict[Role, Count] = {}
    """Registered instances that take no requests, for prefill and for decode.

    An instance with the role BOTH counts for both.
    """
    num_instances: Count = 0
    """Instances that are registered, or expected back."""
    version: int = 27
    """The version that both sides speak. A Conductor of release 27 does not send it, hence the default."""


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The report that the first of several choices was not rejected, so that the front submits the others.

    An answer that is rejected costs one message this way, however many choices it has.
    """

    request_id: str


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The rejection of a request before any token.

    `reason` names the limit, SLO or state as in metrics; `status` is the HTTP status; `retry_after_s` is set
    for 429 and 503.
    """

    request_id: str
    reason: str
    status: int
    message: str
    retry_after_s: float | None = None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The report that an accepted request could not be finished.

    `may_retry`: the request is not the cause, and may be sent again. `is_refused`: the request asks for
    something that is not served. `param` is as in `WorkFailed`.
    """

    request_id: str
    message: str
    may_retry: bool = False
    is_refused: bool = False
    param: str | None = None


class Interrupted(msgspec.Struct, tag=True, frozen=True):
    """The report that a request whose output may have begun needs another pair.

    Its attempt has failed or lost an instance, no instance has taken it over in a migration, or another
    Conductor leads and knows no pair that goes on with it. The front answers with `Continue`, or with
    `Cancel` if nothing more is wanted. The Conductor repeats the message until it is answered.
    """

    request_id: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The report that the decode instance has sent all `num_output_tokens` tokens.

    If fewer have arrived at the front, the others are lost.
    """

    request_id: str
    num_output_tokens: int


# -- worker -> front --------------------------------------------------------------------------------


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request from one iteration, or the first token from a prefill.

    `position` is the index of the first of these tokens in the output.

    `logprobs` has one entry a token; it is empty if the request does not want logprobs.
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
    | Accepted
    | Rejected
    | Failed
    | Interrupted
    | Ended
    | Unknown
    | OperatorAnswer
    | Tokens
)
