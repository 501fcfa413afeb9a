"""What a decision about a request is: a pair of instances and what was predicted, or a rejection.

Pure values. `conductor.scheduling.algorithm1` makes them.
"""

from enum import StrEnum
from typing import NamedTuple

from conductor.view.instances import Instance, Instances
from mooncake.messages.requests import Request
from mooncake.messages.workers import Role


class Reuse(StrEnum):
    """Where the prefix that is not computed is to come from."""

    NONE = "none"
    LOCAL = "local"
    REMOTE = "remote"


class Prediction(NamedTuple):
    """Seconds, kept to be compared with what happens. TTFT is the sum of the first three."""

    queue_s: float
    transfer_s: float
    prefill_s: float
    tbt_s: float

    @property
    def ttft_s(self) -> float:
        """From the decision to the first token."""
        return self.queue_s + self.transfer_s + self.prefill_s


class Placement(NamedTuple):
    """The pair chosen for a request.

    `source` holds the prompt's first `num_source_blocks` blocks, and `prefill` is to fetch what it lacks of
    them; None if it is to use its own `num_local_blocks` only.
    """

    prefill: Instance
    decode: Instance
    num_local_blocks: int
    source: Instance | None
    num_source_blocks: int
    prediction: Prediction

    @property
    def identities(self) -> tuple[bytes, bytes]:
        """The lives of both instances."""
        return self.prefill.identity, self.decode.identity

    @property
    def num_fetched_blocks(self) -> int:
        """The source's blocks that `prefill` is believed to lack."""
        return max(0, self.num_source_blocks - self.num_local_blocks)

    @property
    def reuse(self) -> Reuse:
        """Where the prefix comes from."""
        if self.source is not None:
            return Reuse.REMOTE
        return Reuse.LOCAL if self.num_local_blocks else Reuse.NONE


class Reason(StrEnum):
    """Why a request is turned away. SLOs are named by their keys in the configuration."""

    UNREADY = "unready"
    DUPLICATE = "duplicate"
    TOO_LARGE = "too_large"
    TOO_MANY = "max_running_requests"
    TOO_MANY_WAIT = "max_waiting"
    TTFT = "ttft_slo_s"
    TBT = "tbt_slo_s"
    DOUBLE_CHECK = "double_check"
    NEVER_PLACED = "placement_timeout_s"

    @property
    def status(self) -> int:
        """Of HTTP."""
        return _STATUS.get(self, 429)


_STATUS = {Reason.UNREADY: 503, Reason.NEVER_PLACED: 503, Reason.DUPLICATE: 409, Reason.TOO_LARGE: 400}
_WOULD_TAKE = {Reason.TTFT: "its first token would take", Reason.TBT: "a token would take"}


class Rejection(NamedTuple):
    """Algorithm 1, line 26. `predicted_s` exceeds the SLO of `reason`; it may fit in `retry_after_s`.

    Of a TTFT SLO: `prompt_s` is predicted for the prompt by itself; `kept_s` of the SLO are not for it.
    """

    reason: Reason
    predicted_s: float
    slo_s: float
    retry_after_s: float
    prompt_s: float = 0.0
    kept_s: float = 0.0

    @property
    def message(self) -> str:
        """For the client."""
        kept = f", {1000 * self.kept_s:.1f} ms of them for longer prompts" if self.kept_s else ""
        return (
            f"the cluster is overloaded: {_WOULD_TAKE[self.reason]} {1000 * self.predicted_s:.1f} ms, at most"
            f" {1000 * self.slo_s:g} ms are allowed (conductor.{self.reason}){kept}; come back later"
        )


def num_tokens_held(request: Request, role: Role) -> int:
    """Prefill holds what is known of the sequence, decode all of it."""
    if role is Role.PREFILL:
        return len(request.token_ids)
    return request.num_prompt_tokens + request.sampling.max_tokens


def why_too_large(request: Request, instances: Instances) -> str | None:
    """Which role has no instance, there or about to return, that could hold it; None if both have."""
    for role in (Role.PREFILL, Role.DECODE):
        largest = instances.largest(role)
        if largest is not None and not largest.can_hold(num_tokens_held(request, role)):
            return (
                f"the prompt has {request.num_prompt_tokens} tokens, "
                f"max_tokens is {request.sampling.max_tokens}; "
                f"the KVCache of a {role.value} instance holds at most "
                f"{largest.max_sequence_blocks} blocks of {largest.registration.layout.block_size} tokens"
            )
    return None
