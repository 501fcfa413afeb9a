"""Validation: from a request's bytes to token ids, block keys and sampling parameters.

Owns: parsing, defaults, and checks against the model's limits. Does not know: HTTP, sockets, the cluster. The
functions here have no state, so they may run in another process.
"""

import secrets
import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial

import msgspec

from conductor.front.caches.beginning import Beginning
from conductor.front.caches.context_caches import CacheUse
from conductor.front.errors import tokens_in_words
from conductor.front.openai.body import parse, refusing_depth
from conductor.front.openai.model import ServedModel
from conductor.front.openai.prompt import (
    NO_PREFIX,
    chat_prompt,
    check_num_messages,
    is_brief_conversation,
    num_prompts_of,
    prompts_of,
    tenant_root,
)
from conductor.front.openai.schema import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
    check_extra_fields,
    check_model,
)
from conductor.front.openai.tools import ToolUse, tool_use
from conductor.front.requests.grammars import WantedGrammar, wanted_grammar
from conductor.front.requests.sampling import Sampling
from mooncake.errors import RequestError
from mooncake.messages.blocks import block_keys
from mooncake.messages.fronts import ClusterState, QuotaClaim
from mooncake.messages.requests import Request, SamplingParams, SpanContext
from mooncake.security.api_keys import ApiKey

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for plain completions; a chat may use the whole context


GenerationRequest = ChatCompletionRequest | CompletionRequest


class CacheWantedError(Exception):
    """The error of a request that names a context cache which the caller has not looked up."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class ApiEndpoint(Enum):
    """The endpoints that generate: chats and plain completions."""

    CHAT = "chat"
    COMPLETION = "completion"

    @property
    def id_prefix(self) -> str:
        """The prefix of the ids of answers."""
        return "chatcmpl" if self is ApiEndpoint.CHAT else "cmpl"


class UsageShown(Enum):
    """The events of a stream that show token counts."""

    NOWHERE = "nowhere"
    AT_END = "at the end"
    IN_EACH_CHUNK = "in each chunk"


class KeyedPrompt(msgspec.Struct, frozen=True):
    """One prompt as token ids, with the block keys of its full blocks."""

    token_ids: list[int]
    keys: list[bytes]


class Job(msgspec.Struct, frozen=True):
    """A valid HTTP request for generation. Choice `i` answers prompt `i // num_choices_per_prompt`."""

    endpoint: ApiEndpoint
    id: str
    prompts: list[KeyedPrompt]
    num_choices_per_prompt: int
    sampling: list[SamplingParams]
    max_tokens_field: str | None
    """The field by which the client chose `max_tokens`; None if it is the default."""
    stops: tuple[str, ...]
    stream: bool
    usage_shown: UsageShown
    return_token_ids: bool
    client_request_id: str | None
    root_key: bytes
    is_salted: bool
    tools: ToolUse | None = None
    """The tools that the answer may call; None if it may call no tools."""
    grammar: WantedGrammar | None = None
    """The grammar that the answer must follow, not compiled yet; None if the answer may be any text."""
    priority: int = 0
    slo_class: str = ""
    tenant: str = ""
    claim: QuotaClaim | None = None
    """The answer's claim on the tenant's quota; None before it is made, or if the tenant has no quota."""
    num_shared: Sequence[int] = ()
    """The length in tokens of each prompt's common prefix with the context cache; empty without a cache."""
    cache_use: CacheUse | None = None
    """The counter of the context cache's savings; None without a cache."""

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts. A prompt counts once, however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def requests(self, reply_to: str, span: SpanContext | None = None) -> list[Request]:
        """Return one Request for each choice, in the order of the choices.

        `span` is the context of the HTTP request's span.
        """
        return [
            Request(
                request_id=f"{self.id}-{index}",
                token_ids=self.prompts[index // self.num_choices_per_prompt].token_ids,
                block_keys=self.prompts[index // self.num_choices_per_prompt].keys,
                sampling=sampling,
                reply_to=reply_to,
                root_key=self.root_key,
                is_salted=self.is_salted,
                priority=self.priority,
                slo_class=self.slo_class,
                tenant=self.tenant,
                answer_id=self.id,
                span=span,
            )
            for index, sampling in enumerate(self.sampling)
        ]


def read_job(
    endpoint: ApiEndpoint,
    body: bytes,
    model: ServedModel,
    served_model_name: str,
    max_choices: int,
    key: ApiKey | None = None,
    cache: Beginning | None = None,
) -> Job:
    """Return the job in a body, by `read_request` and then `job_of`. Raises as these functions do."""
    return job_of(read_request(endpoint, body, model, served_model_name), model, max_choices, key, cache)


def read_request(
    endpoint: ApiEndpoint, body: bytes, model: ServedModel, served_model_name: str
) -> GenerationRequest:
    """Return the parsed fields of a body, each checked by itself.

    Raises RequestError that names the field.
    """
    request: GenerationRequest
    with refusing_depth():
        if endpoint is ApiEndpoint.CHAT:
            request = parse(ChatCompletionRequest, body, partial(check_num_messages, model=model))
        else:
            request = parse(CompletionRequest, body)
        check_extra_fields(request)
    check_model(request.model, served_model_name)
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is only allowed with stream: true", param="stream_options", code="invalid_value"
        )
    return request


def is_brief(request: GenerationRequest) -> bool:
    """Return whether a request with a short body has short prompts.

    A context cache may add much to a prompt, and so may variables of the chat template.
    """
    if request.context_cache is not None:
        return False
    return not isinstance(request, ChatCompletionRequest) or is_brief_conversation(
        len(request.messages), request.chat_template_kwargs
    )


def job_of(
    request: GenerationRequest,
    model: ServedModel,
    max_choices: int,
    key: ApiKey | None = None,
    cache: Beginning | None = None,
) -> Job:
    """Return the job of a request: its fields checked together, its prompts tokenized.

    Raises RequestError that names the field, except for text that the tokenizer refuses.

    Args:
        request: The request.
        model: The model.
        max_choices: The most choices of a request.
        key: The client's API key. Requests share KVCache if they have the same salt, which is made of the
            key's salt and the request's `cache_salt`, if there is one.
        cache: The content of the context cache that the request names; None if it was not looked up. If the
            request names a cache and this is None, CacheWantedError is raised.
    """
    with refusing_depth():
        return _job_of(request, model, max_choices, key, cache)


def _job_of(
    request: GenerationRequest,
    model: ServedModel,
    max_choices: int,
    key: ApiKey | None,
    cache: Beginning | None,
) -> Job:
    endpoint = ApiEndpoint.CHAT if isinstance(request, ChatCompletionRequest) else ApiEndpoint.COMPLETION
    stops, tools = _stops(request.stop), None
    if request.context_cache is not None:
        if cache is None:
            raise CacheWantedError(request.context_cache)
        cache.check_salt(request.cache_salt)
    num_choices_per_prompt = request.n or 1
    if isinstance(request, ChatCompletionRequest):
        _check_choices(1, num_choices_per_prompt, max_choices)
        before = NO_PREFIX if cache is None else cache.chat_prefix(request.tools or [])
        offered = before.tools or request.tools or []
        tools = tool_use(offered, request.tool_choice, request.parallel_tool_calls, model.tool_format)
        shown = before.tools if request.tool_choice == "none" else offered
        prompts = [chat_prompt(before, request.messages, shown, model, request.chat_template_kwargs or {})]
    else:
        _check_choices(num_prompts_of(request.prompt), num_choices_per_prompt, max_choices)
        prompts = prompts_of(request.prompt, model, () if cache is None else cache.token_ids)
    grammar = wanted_grammar(request.response_format, tools, model)
    wanted = Sampling(request, model, grammar)
    sampling = [
        wanted.params(_max_tokens(request, len(prompt), model.context_len), index)
        for prompt in prompts
        for index in range(num_choices_per_prompt)
    ]
    root, is_salted = tenant_root(model, key, request.cache_salt if cache is None else cache.cache_salt)
    return Job(
        endpoint=endpoint,
        id=f"{endpoint.id_prefix}-{secrets.token_hex(16)}",
        prompts=[KeyedPrompt(prompt, block_keys(prompt, model.block_size, root)) for prompt in prompts],
        num_choices_per_prompt=num_choices_per_prompt,
        sampling=sampling,
        max_tokens_field=_given_max_tokens(request)[0],
        stops=stops,
        stream=bool(request.stream),
        usage_shown=_usage_shown(request.stream_options),
        return_token_ids=bool(request.return_token_ids),
        client_request_id=request.request_id,
        root_key=root,
        is_salted=is_salted,
        tools=None if tools is None else tools.bare(),
        grammar=grammar,
        priority=priority_of(request.priority, key),
        num_shared=() if cache is None else [cache.num_shared(prompt) for prompt in prompts],
    )


def _check_choices(num_prompts: int, num_choices_per_prompt: int, max_choices: int) -> None:
    """Check the number of choices. Raises RequestError.

    To be called before tokenizing, as a million prompts would take minutes.
    """
    if num_prompts * num_choices_per_prompt > max_choices:
        raise RequestError(
            f"{num_prompts} prompts with n={num_choices_per_prompt} are more than {max_choices} choices; "
            "send several requests",
            param="prompt" if num_prompts > 1 else "n",
            code="invalid_value",
        )


def fit_into_pool(job: Job, cluster: ClusterState, block_size: int) -> Job:
    """Return the job with an output length that the instances can hold.

    The output length is cut, unless the client has chosen it. Raises RequestError if no pair of instances
    could ever hold the longest prompt with the output that the client has chosen, or with a single token if
    the client has chosen none. Until there has been a pair, sizes are unknown, and the job is not changed.
    """
    if cluster.max_sequence_blocks == 0:
        return job
    pool_len = cluster.max_sequence_blocks * block_size
    held = f"the instances' KVCache can hold at most {pool_len}"
    num_tokens = max(len(prompt.token_ids) for prompt in job.prompts)
    if num_tokens >= pool_len:
        raise RequestError(
            f"the prompt has {tokens_in_words(num_tokens)}, but {held}, the answer included; "
            "shorten it or start the server with larger pools",
            param=_prompt_field(job.endpoint),
            code="prompt_exceeds_pool",
        )
    if job.max_tokens_field is None:
        return msgspec.structs.replace(
            job, sampling=[_cut(params, pool_len - num_tokens) for params in job.sampling]
        )
    max_tokens = job.sampling[0].max_tokens
    if num_tokens + max_tokens > pool_len:
        raise RequestError(
            f"the prompt has {tokens_in_words(num_tokens)} and {job.max_tokens_field} is {max_tokens}, but"
            f" {held}; reduce {job.max_tokens_field} to {pool_len - num_tokens} or less",
            param=job.max_tokens_field,
            code="output_exceeds_pool",
        )
    return job


def _cut(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return msgspec.structs.replace(params, max_tokens=min(params.max_tokens, max_tokens))


def priority_of(wanted: int | None, key: ApiKey | None) -> int:
    """Return the priority of a request: the wanted priority or, if that is None, the key's.

    Raises RequestError if the key does not allow the wanted priority.
    """
    first = 0 if key is None else key.priority or 0
    if wanted is None:
        return first
    if key is not None and wanted < first:
        raise RequestError(
            f"priority is {wanted}, and requests of this API key may have {first} or more",
            status=403,
            param="priority",
            code="invalid_value",
        )
    return wanted


def _usage_shown(options: StreamOptions | None) -> UsageShown:
    if options is None or not options.include_usage:
        return UsageShown.NOWHERE
    return UsageShown.IN_EACH_CHUNK if options.continuous_usage_stats else UsageShown.AT_END


def _prompt_field(endpoint: ApiEndpoint) -> str:
    return "messages" if endpoint is ApiEndpoint.CHAT else "prompt"


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise RequestError("stop: expected a string or a list of strings", param="stop", code="invalid_value")
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"stop: at most {MAX_STOPS} strings, got {len(stops)}", param="stop", code="invalid_value"
        )
    if not all(0 < len(item) <= MAX_STOP_CHARS for item in stops):
        raise RequestError(
            f"stop: each string must have 1 to {MAX_STOP_CHARS} characters",
            param="stop",
            code="invalid_value",
        )
    return tuple(dict.fromkeys(stops))


def _given_max_tokens(request: GenerationRequest) -> tuple[str | None, int]:
    """Return the field that limits the output, and its value; without such a field, None and the default.

    Raises RequestError if two fields disagree.
    """
    if isinstance(request, ChatCompletionRequest) and (newer := request.max_completion_tokens) is not None:
        if request.max_tokens not in (None, newer):
            raise RequestError(
                f"max_tokens is {request.max_tokens} and max_completion_tokens is {newer}; give one of them",
                param="max_tokens",
                code="invalid_value",
            )
        return "max_completion_tokens", newer
    if request.max_tokens is not None:
        return "max_tokens", request.max_tokens
    return None, sys.maxsize if isinstance(request, ChatCompletionRequest) else DEFAULT_COMPLETION_TOKENS


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, context_len: int) -> int:
    field, max_tokens = _given_max_tokens(request)
    room = context_len - num_prompt_tokens
    if field is not None and max_tokens > room:
        raise RequestError(
            f"the prompt has {tokens_in_words(num_prompt_tokens)} and {field} is {max_tokens}, together "
            f"{num_prompt_tokens + max_tokens}, but this model's maximum context length is {context_len} "
            f"tokens; reduce {field} to {room} or less, or shorten the prompt",
            param=field,
            code="context_length_exceeded",
        )
    return min(max_tokens, room)
