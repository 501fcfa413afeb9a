"""Requests as they pass through the cluster: the tokens of the prompt, and the parameters of the draws.

Owns: requests, their attempts, steps and spans, why an output ends. Does not know: instances, messages.
"""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from mooncake.messages.blocks import BlockKey, extended_keys
from mooncake.messages.quantities import Count, Priority, TokenId


class FinishReason(StrEnum):
    """The reasons why an output ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """The name of one attempt of a request under one Conductor.

    Work of other epochs or attempts is dropped.
    """

    epoch: int
    request_id: str
    attempt: int


class HeldStep(StrEnum):
    """The step of a request of an earlier Conductor at the instance that holds it."""

    PROMPT = "prompt"
    """The prefill instance has the prompt, and will report its first token, even if it has done so before."""
    RESERVED = "reserved"
    """The decode instance has pages for the prompt, or waits for them.

    Another instance computes the prompt.
    """
    INLINED = "inlined"
    """The decode instance computes the prompt itself, or is about to."""
    DECODING = "decoding"
    """The prompt is computed, and tokens follow."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A request with which an instance goes on, under the name of an earlier Conductor's attempt."""

    ref: Ref
    step: HeldStep


class SamplingParams(msgspec.Struct, frozen=True):
    """The parameters of draws. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 do not filter.

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
    """The output length in tokens before which no stop token is drawn."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The token sequences that the output must not contain."""
    grammar: str = ""
    """The grammar that the whole output follows (`mooncake.model.grammar`); empty for none."""
    num_logprobs: int | None = None
    """The number of likeliest tokens whose logprobs are reported; None: no logprobs at all.

    The drawn token's logprob is reported beside them.
    """


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The logprobs of a drawn token and of the likeliest tokens, by the model's unchanged logits."""

    logprob: float
    top_token_ids: list[int]
    """The most likely tokens, in descending order."""
    top_logprobs: list[float]


class Flow(NamedTuple):
    """A tenant and one of its answers: the unit of fair shares. All choices of an answer are one flow."""

    tenant: str
    answer_id: str


class SpanContext(msgspec.Struct, frozen=True, array_like=True):
    """A span of a distributed trace, as named by the headers of W3C Trace Context."""

    traceparent: str
    tracestate: str = ""

    @property
    def is_sampled(self) -> bool:
        """Whether spans below this one are recorded."""
        return int(self.traceparent[-2:], 16) % 2 == 1


class Request(msgspec.Struct, frozen=True):
    """One generation that the Conductor places: a prompt, and the parameters of its draws.

    `block_keys` name the full blocks of `token_ids`; tokens behind the last full block have no key.
    `reply_to` is the ZeroMQ endpoint of the front that waits for the tokens. `is_salted`: the keys are
    private to one tenant (`cache_salt`), so KV events do not contain the tokens of the blocks. `root_key` is
    the parent of the first block. A lower `priority` goes first.
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
    """The name of the SLO class; empty: the default SLOs."""
    tenant: str = ""
    """The owner of the API key; tenants share the cluster fairly."""
    answer_id: str = ""
    """The id of the answer of which this request is one choice; empty if the answer has no other choice."""
    num_output_tokens: Count = 0
    """The number of tokens at the end of `token_ids` that earlier attempts have drawn.

    This attempt continues behind them.
    """
    span: SpanContext | None = None
    """The span below which the request's work is recorded; None if the front does not trace."""

    @property
    def is_traced(self) -> bool:
        """Whether spans of the request's work are recorded."""
        return self.span is not None and self.span.is_sampled

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_output_tokens

    @property
    def flow(self) -> Flow:
        """The flow to which the request belongs."""
        return Flow(self.tenant, self.answer_id or self.request_id)

    @property
    def output(self) -> list[int]:
        """The tokens that earlier attempts have drawn."""
        return self.token_ids[self.num_prompt_tokens :]

    def continued(self, output: list[int], block_size: int) -> "Request":
        """Return the request that continues behind `output`, which begins with this request's output."""
        token_ids = self.token_ids[: self.num_prompt_tokens] + output
        keys = extended_keys(self.block_keys, token_ids, block_size, self.root_key)
        return msgspec.structs.replace(
            self, token_ids=token_ids, block_keys=keys, num_output_tokens=len(output)
        )
