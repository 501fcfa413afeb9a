"""Bodies of `POST /v1/context_caches`: from bytes to the job that computes the blocks to keep.

Owns: the fields of these bodies, checks and defaults. Does not know: HTTP, which caches there are. The
functions here have no state, so they may run in another process.
"""

import time
from functools import partial
from typing import Annotated, NamedTuple

from pydantic import Field, SkipValidation

from conductor.front.openai.body import parse, refusing_depth
from conductor.front.openai.fields import WHOLE, KnownFields, ListOf
from conductor.front.openai.model import ServedModel
from conductor.front.openai.prompt import (
    ChatPrefix,
    check_num_messages,
    prefix_tokens,
    prompts_of,
    tenant_root,
)
from conductor.front.openai.schema import (
    MAX_CACHE_NAME_CHARS,
    MAX_SALT_CHARS,
    Message,
    Priority,
    Text,
    TokenIds,
    check_message_fields,
    check_model,
)
from conductor.front.openai.tools import MAX_TOOLS, ToolFields
from conductor.front.requests.validation import ApiEndpoint, Job, KeyedPrompt, UsageShown, priority_of
from mooncake.errors import RequestError
from mooncake.messages.blocks import block_keys
from mooncake.messages.requests import SamplingParams
from mooncake.security.api_keys import ApiKey

MAX_TTL_S = 30 * 24 * 3600
DEFAULT_TTL_S = 3600
_NAME_PATTERN = r"^[A-Za-z0-9._-]+$"

Ttl = Annotated[int, Field(ge=1, le=MAX_TTL_S), WHOLE]


class ContextCacheRequest(KnownFields):
    """The body of `POST /v1/context_caches`: the beginning of a conversation, or of a prompt."""

    model: str | None = None
    name: Annotated[str, Field(pattern=_NAME_PATTERN, max_length=MAX_CACHE_NAME_CHARS)] | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    tools: Annotated[ListOf[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    prompt: SkipValidation[Text | TokenIds | None] = Field(None, description="a text, or token ids")
    ttl: Ttl | None = Field(None, description=f"seconds; default: {DEFAULT_TTL_S}")
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    priority: Priority | None = None


class NewBeginning(NamedTuple):
    """The content of a new context cache, its time to live and its name."""

    name: str | None
    ttl_s: int
    cache_salt: str | None
    chat_prefix_json: bytes | None
    """The `ChatPrefix` as JSON, as in `caches.beginning.Beginning`; None for a plain prompt."""
    job: Job
    """The job that computes the blocks: one prompt, whose answer of one token is dropped."""


def read_beginning(
    body: bytes, model: ServedModel, served_model_name: str, key: ApiKey | None
) -> NewBeginning:
    """Read the body of a new context cache. Raises RequestError."""
    wanted = parse(ContextCacheRequest, body, partial(check_num_messages, model=model))
    check_model(wanted.model, served_model_name)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise RequestError(
            "expected either messages or prompt", param="messages", code="missing_required_parameter"
        )
    prefix = chat_prefix_json = None
    if wanted.messages is not None:
        check_message_fields(wanted.messages)
        prefix = ChatPrefix(wanted.messages, wanted.tools or ())
        with refusing_depth():
            token_ids = prefix_tokens(prefix, model)
            chat_prefix_json = prefix.to_json()
    elif wanted.tools is not None:
        raise RequestError("tools is for messages", param="tools", code="invalid_value")
    else:
        token_ids, *others = prompts_of(wanted.prompt, model)
        if others:
            raise RequestError("prompt: expected one prompt", param="prompt", code="invalid_value")
    if len(token_ids) < model.block_size:
        raise RequestError(
            f"there are {len(token_ids)} tokens, and KVCache is kept in blocks of {model.block_size}",
            param="messages" if prefix else "prompt",
            code="invalid_value",
        )
    return NewBeginning(
        name=wanted.name,
        ttl_s=wanted.ttl or DEFAULT_TTL_S,
        cache_salt=wanted.cache_salt,
        chat_prefix_json=chat_prefix_json,
        job=_job_for(token_ids, wanted, model, key),
    )


def _job_for(
    token_ids: list[int], wanted: ContextCacheRequest, model: ServedModel, key: ApiKey | None
) -> Job:
    root, is_salted = tenant_root(model, key, wanted.cache_salt)
    return Job(
        endpoint=ApiEndpoint.COMPLETION,
        id=f"cache-{time.time_ns():x}",
        prompts=[KeyedPrompt(token_ids, block_keys(token_ids, model.block_size, root))],
        num_choices_per_prompt=1,
        sampling=[SamplingParams(max_tokens=1, temperature=0.0)],
        max_tokens_field=None,
        stops=(),
        stream=False,
        usage_shown=UsageShown.NOWHERE,
        return_token_ids=False,
        client_request_id=None,
        root_key=root,
        is_salted=is_salted,
        priority=priority_of(wanted.priority, key),
        tenant="" if key is None else key.name,
    )
