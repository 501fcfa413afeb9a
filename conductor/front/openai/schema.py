"""The fields of OpenAI's requests: served fields, and fields that are refused by name.

A field that would change the answer is never ignored: either the field is served, or it has a value without
effect, or the request is refused. Null means "not given" everywhere, as in OpenAI's API.

Owns: field names, types, bounds and neutral values. Does not know: prompts and tokens (`validation`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from conductor.front.openai.fields import WHOLE, KnownFields, ListOf, at_most
from conductor.front.openai.tools import MAX_TOOLS, ToolCallFields, ToolChoice, ToolFields
from mooncake.errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 512
MAX_CACHE_NAME_CHARS = 64
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 4096
"""The most tokens of all bad words together, as each choice of an answer carries them."""
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 1024
MAX_TEMPLATE_VARIABLES = 32
MAX_TOP_LOGPROBS = 20
_MAX_QUOTED_CHARS = 80
REQUEST_ID_PATTERN = r"^[!-~]{1,128}$"
"""The pattern of request ids: characters that may be in a header and a log line."""

Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[str, Bias],
    Field(max_length=MAX_BIASES, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
    at_most(MAX_BIASES),
]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TemplateVariables = Annotated[
    dict[str, SkipValidation[Any]],
    Field(max_length=MAX_TEMPLATE_VARIABLES, description="variables of the chat template"),
    at_most(MAX_TEMPLATE_VARIABLES),
]
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[int], Field(min_length=1)]
Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that are not served, by name, with the values that have no effect."""


_UNSERVED: Neutral = {
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_UNSERVED_IN_CHAT: Neutral = {
    **_UNSERVED,
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_UNSERVED_IN_COMPLETIONS: Neutral = {
    **_UNSERVED,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
_UNSERVED_IN_MESSAGE: Neutral = {
    # Fields that OpenAI's own client puts into an assistant's message that it sends back.
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
}
_UNSERVED_IN_STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,)}


def _with_unserved(unserved: Neutral) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds the unserved fields to a JSON schema, and forbids unknown fields.

    For each unserved field the schema allows only null and the values that have no effect.
    """

    def describe(schema: dict[str, Any]) -> None:
        for name, neutral in unserved.items():
            schema["properties"][name] = {"enum": [None, *neutral], "description": "not served"}
        schema["additionalProperties"] = False

    return describe


class JsonSchemaFields(KnownFields):
    """A JSON schema that the answer follows; `strict` is accepted and has no effect."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, SkipValidation[Any]], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(KnownFields):
    """The form of the answer: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None


class StreamOptions(BaseModel):
    """Options of a stream: what its chunks show beside the answer."""

    model_config = ConfigDict(
        extra="allow", strict=True, json_schema_extra=_with_unserved(_UNSERVED_IN_STREAM_OPTIONS)
    )

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="with include_usage: in each chunk")


class GenerationFields(BaseModel):
    """The fields that chat and plain completions share. `check_extra_fields` checks all other fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = Field(default=None, description="0 or -1: all tokens")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Biases | None = None
    bad_words: Annotated[ListOf[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    response_format: ResponseFormat | None = None
    priority: Priority | None = Field(None, description="lower goes first")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    # Its limits are only documented here; `conductor.front.requests.validation` checks them.
    stop: SkipValidation[Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None] = None
    stop_token_ids: Annotated[ListOf[SkipValidation[int]], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    context_cache: Annotated[str, Field(max_length=MAX_CACHE_NAME_CHARS)] | None = Field(
        None, description="id or name: the prompt goes on behind this context cache"
    )
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = None
    user: str | None = None
    metadata: dict[str, SkipValidation[Any]] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TextPart(BaseModel):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation. `content` is text or a list of text parts, or None beside tool calls."""

    model_config = ConfigDict(
        extra="allow", strict=True, json_schema_extra=_with_unserved(_UNSERVED_IN_MESSAGE)
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: SkipValidation[str | list[TextPart] | None] = None
    name: str | None = None
    tool_calls: ListOf[ToolCallFields] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(GenerationFields):
    """The body of `/v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra=_with_unserved(_UNSERVED_IN_CHAT))

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None
    tools: Annotated[ListOf[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: SkipValidation[ToolChoice | None] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class CompletionRequest(GenerationFields):
    """The body of `/v1/completions`."""

    model_config = ConfigDict(json_schema_extra=_with_unserved(_UNSERVED_IN_COMPLETIONS))

    prompt: SkipValidation[Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1)]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None


def check_extra_fields(request: ChatCompletionRequest | CompletionRequest) -> None:
    """Refuse unknown fields, and values that are not served. Raises RequestError that names the field."""
    if isinstance(request, ChatCompletionRequest):
        _check(request, _UNSERVED_IN_CHAT, "")
        check_message_fields(request.messages)
    else:
        _check(request, _UNSERVED_IN_COMPLETIONS, "")
    if request.stream_options is not None:
        _check(request.stream_options, _UNSERVED_IN_STREAM_OPTIONS, "stream_options.")


def check_message_fields(messages: Sequence[Message]) -> None:
    """Refuse unknown fields of messages, and values that are not served.

    Raises RequestError that names the field.
    """
    for index, message in enumerate(messages):
        _check(message, _UNSERVED_IN_MESSAGE, f"messages[{index}].")


def _check(fields: BaseModel, unserved: Neutral, path: str) -> None:
    for name, value in (fields.model_extra or {}).items():
        if name not in unserved:
            raise RequestError(
                f"unknown field {path + shortened(name)!r}", param=path + name, code="unknown_parameter"
            )
        if value is not None and not any(_same(value, neutral) for neutral in unserved[name]):
            raise RequestError(
                f"{path}{name} is not supported by this server; leave it out",
                param=path + name,
                code="unsupported_parameter",
            )


def _same(value: Any, neutral: Any) -> bool:
    # False == 0 in Python, but `logprobs: 0` asks for something and `logprobs: false` does not.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def check_model(name: str | None, served_model_name: str) -> None:
    """Check that a request names the served model, or none. Raises RequestError."""
    if name not in (None, served_model_name):
        raise RequestError(
            f"the model {shortened(str(name))!r} does not exist; this server serves {served_model_name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def shortened(text: str) -> str:
    """Return the beginning of `text` for an error message, which must not repeat megabytes."""
    return text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + "..."
