"""What a client has asked for, as it goes through the cluster: tokens in, how tokens out are drawn.

Owns: requests, their attempts, why an answer ends. Does not know: who serves them, messages.
"""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from mooncake.messages.blocks import BlockKey, extended_keys
from mooncake.messages.quantities import Count, Priority, TokenId


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

    max_tokens: Count
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
    """the whole output is one of its texts (`mooncake.model.grammar`); empty: it may be any"""
    num_logprobs: int | None = None
    """report the logprobs of each drawn token and of so many likeliest ones; None: of none"""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logarithms of the probabilities that the model gave to a drawn token and to the likeliest in its place:
    of the logits as they came, whatever the request wants changed of them."""

    logprob: float
    top_token_ids: list[int]
    """descending"""
    top_logprobs: list[float]


class Flow(NamedTuple):
    """What gets an equal part where requests compete: a tenant, and in it an answer with all its choices."""

    tenant: str
    answer_id: str


class Request(msgspec.Struct, frozen=True):
    """A prompt on its way through the cluster.

    `block_keys` name the full blocks of `token_ids`; tokens behind the last full block have no key.
    `reply_to` is the ZeroMQ endpoint of the front that waits for the tokens. `is_salted`: the keys are those
    of one tenant (`cache_salt`), so nobody else is told which tokens they stand for. `root_key` is the parent
    of the first block. Where requests wait for one another, those of a lower `priority` go first.
    """

    request_id: str
    token_ids: list[TokenId]
    block_keys: list[BlockKey]
    sampling: SamplingParams
    reply_to: str
    is_salted: bool = False
    root_key: BlockKey = b""
    priority: Priority = 0
    slo_class: str = ""
    """whose SLOs it is promised; empty: those of all"""
    tenant: str = ""
    """on whose behalf: tenants share the cluster fairly"""
    answer_id: str = ""
    """of the answer that it is one choice of; empty: it has no other"""
    num_output_tokens: Count = 0
    """the last so many of `token_ids` were drawn in earlier attempts: this one goes on behind them"""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_output_tokens

    @property
    def flow(self) -> Flow:
        """With which requests it shares its part of the cluster."""
        return Flow(self.tenant, self.answer_id or self.request_id)

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
