"""The pair of instances that a request gets, with predicted times. Pure values."""

from enum import StrEnum
from typing import NamedTuple

from conductor.view.instances import Instance, Instances
from mooncake.messages.requests import Request
from mooncake.messages.workers import STAGES, Role


class Reuse(StrEnum):
    """The origin of the prefix that needs no prefill: none, the prefill instance's pool, or a fetch."""

    NONE = "none"
    LOCAL = "local"
    REMOTE = "remote"


class Prediction(NamedTuple):
    """The predicted seconds of a placement, kept for comparison with actual seconds."""

    queue_s: float
    transfer_s: float
    prefill_s: float
    gap_s: float
    """The mean seconds between two tokens.

    The TBT, which SLOs limit, is the mean of the longest gaps only.
    """
    beside_s: float = 0.0
    """Seconds of other requests' iterations between the chunks of an inlined prompt."""

    @property
    def ttft_s(self) -> float:
        """Seconds from the decision to the first token."""
        return self.queue_s + self.transfer_s + self.prefill_s + self.beside_s


class Placement(NamedTuple):
    """The pair chosen for a request: two instances, or one that inlines the prompt."""

    prefill: Instance
    decode: Instance
    num_local_blocks: int
    """The number of the prompt's leading blocks that `prefill` holds, or will hold at the prompt's turn."""
    num_coming_blocks: int
    """The number of blocks at the end of the local prefix that earlier prompts have yet to compute.

    Invariant: `0 <= num_coming_blocks <= num_local_blocks`.
    """
    source: Instance | None
    """The instance from which `prefill` fetches missing blocks; None if it fetches none."""
    num_source_blocks: int
    """The number of the prompt's leading blocks that the source holds."""
    prediction: Prediction

    @property
    def is_inlined(self) -> bool:
        """Whether the decode instance computes the prompt itself."""
        return self.prefill is self.decode

    @property
    def identities(self) -> tuple[bytes, bytes]:
        """The socket identities of the prefill and the decode instance, which name their lives."""
        return self.prefill.identity, self.decode.identity

    @property
    def num_fetched_blocks(self) -> int:
        """The number of the source's blocks that `prefill` is believed to lack."""
        return max(0, self.num_source_blocks - self.num_local_blocks)

    @property
    def reuse(self) -> Reuse:
        """The origin of the prefix that needs no prefill."""
        if self.source is not None:
            return Reuse.REMOTE
        return Reuse.LOCAL if self.num_local_blocks else Reuse.NONE


def num_tokens_held(request: Request, stage: Role) -> int:
    """Return the tokens that an instance holds in a stage.

    For prefill they are the prompt. For decode they are the prompt and the longest possible output.
    """
    if stage is Role.PREFILL:
        return len(request.token_ids)
    return request.num_prompt_tokens + request.sampling.max_tokens


def why_too_large(request: Request, instances: Instances) -> str | None:
    """Return why no pair can hold the request; None if a pair can. Pairs that are expected back count."""
    for stage in STAGES:
        largest = instances.largest(stage)
        if largest is not None and not largest.can_hold(num_tokens_held(request, stage), stage):
            return (
                f"the prompt has {request.num_prompt_tokens} tokens, "
                f"max_tokens is {request.sampling.max_tokens}; "
                f"the KVCache of a {stage.value} instance holds at most "
                f"{largest.max_blocks(stage)} blocks of {largest.registration.layout.block_size} tokens"
            )
    return None
