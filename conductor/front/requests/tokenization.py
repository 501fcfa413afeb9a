"""The endpoints `/tokenize` and `/detokenize`, in vLLM's formats: the token ids of a prompt, and back.

Owns: the bodies and answers. Does not know: HTTP. The functions here have no state, so they may run in
another process.
"""

from enum import Enum
from functools import partial
from typing import Annotated, Any

import msgspec
from pydantic import Field, SkipValidation

from conductor.front.openai.body import ReceivedBody, parse, refusing_depth
from conductor.front.openai.fields import MAX_FIELDS, KnownFields, ListOf
from conductor.front.openai.model import ServedModel
from conductor.front.openai.prompt import (
    chat_tokens,
    check_num_messages,
    check_token_ids,
    is_brief_conversation,
    text_tokens,
)
from conductor.front.openai.schema import Message, TemplateVariables, check_message_fields, check_model
from conductor.front.openai.tools import MAX_TOOLS, ToolFields
from mooncake.errors import RequestError


class AboutTokens(Enum):
    """The kinds of requests about tokens."""

    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


class TokenizeRequest(KnownFields):
    """The body of `/tokenize`: a text, or a conversation, which the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = None
    tools: Annotated[ListOf[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = Field(None, description="of a text; default: true")
    add_generation_prompt: bool | None = Field(None, description="of a conversation; default: true")
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class DetokenizeRequest(KnownFields):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: ListOf[SkipValidation[int]]


def answer_about_tokens(
    kind: AboutTokens, body: bytes, model: ServedModel, served_model_name: str, *, only_brief: bool = False
) -> bytes | None:
    """Return the answer in JSON. Raises RequestError.

    With `only_brief`, the result is None if making the answer may take long.
    """
    if kind is AboutTokens.DETOKENIZE:
        return msgspec.json.encode(detokenize(body, model, served_model_name))
    request = _tokenize_request(body, model)
    if only_brief and not _is_brief(request):
        return None
    return msgspec.json.encode(_tokenized(request, model, served_model_name))


def _is_brief(request: TokenizeRequest) -> bool:
    """Return whether the answer to a request with a short body takes little time to make.

    False if the request asks for the strings of tokens, or if the chat template may make a long prompt of its
    variables.
    """
    num_messages, variables = len(request.messages or ()), request.chat_template_kwargs
    return not request.return_token_strs and is_brief_conversation(num_messages, variables)


def check_num_ids(body: ReceivedBody, model: ServedModel) -> None:
    """Check, before the body is parsed, that it has no more ids than a prompt may have. Raises RequestError.

    This counts commas, and lets a few ids too many pass.
    """
    num_ids = body.count(b",") + 1
    if num_ids > model.context_len + MAX_FIELDS:
        raise _too_many(f"about {num_ids}", model)


def _too_many(num: str, model: ServedModel) -> RequestError:
    return RequestError(
        f"tokens: expected at most {model.context_len} ids, this model's context length, got {num}",
        param="tokens",
        code="context_length_exceeded",
    )


def tokenize(body: bytes, model: ServedModel, served_model_name: str) -> dict[str, Any]:
    """Return the body of the answer to `/tokenize`. Raises RequestError."""
    return _tokenized(_tokenize_request(body, model), model, served_model_name)


def _tokenize_request(body: bytes, model: ServedModel) -> TokenizeRequest:
    return parse(TokenizeRequest, body, partial(check_num_messages, model=model))


def _tokenized(request: TokenizeRequest, model: ServedModel, served_model_name: str) -> dict[str, Any]:
    check_model(request.model, served_model_name)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError(
            "expected either prompt or messages", param="prompt", code="missing_required_parameter"
        )
    if request.messages is not None:
        if request.add_special_tokens is not None:
            raise RequestError(
                "add_special_tokens is for a prompt; the chat template writes those of messages",
                param="add_special_tokens",
                code="invalid_value",
            )
        check_message_fields(request.messages)
        with refusing_depth():
            tokens = chat_tokens(
                request.messages,
                request.tools or [],
                model,
                request.chat_template_kwargs or {},
                add_generation_prompt=request.add_generation_prompt is not False,
            )
    else:
        for name in ("add_generation_prompt", "chat_template_kwargs", "tools"):
            if getattr(request, name) is not None:
                raise RequestError(f"{name} is for messages", param=name, code="invalid_value")
        tokens = text_tokens(request.prompt or "", model, "prompt", request.add_special_tokens is not False)
    token_bytes = model.tokenizer.token_bytes
    return {
        "count": len(tokens),
        "max_model_len": model.context_len,
        "tokens": tokens,
        "token_strs": [token_bytes(token).decode(errors="replace") for token in tokens]
        if request.return_token_strs
        else None,
    }


def detokenize(body: bytes, model: ServedModel, served_model_name: str) -> dict[str, Any]:
    """Return the body of the answer to `/detokenize`; special tokens are part of the text.

    Raises RequestError.
    """
    request = parse(DetokenizeRequest, body)
    check_model(request.model, served_model_name)
    if len(request.tokens) > model.context_len:
        raise _too_many(str(len(request.tokens)), model)
    check_token_ids(request.tokens, model, "tokens")
    return {"prompt": model.tokenizer.decode(request.tokens, skip_special_tokens=False)}
