"""Prompts: from messages, text or token ids to the token ids that the model gets.

Owns: the forms of `prompt`, the check that a prompt leaves room for an answer. Does not know: what messages
and tools consist of (`conversation`, `tools`), other fields.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

from conductor.front.openai.conversation import index_of_tool_use, rendered_messages
from conductor.front.openai.model import ServedModel
from conductor.front.openai.schema import Message, shortened
from conductor.front.openai.tools import ToolFields, describe_tools, rendered_tools
from mooncake.errors import RequestError
from mooncake.messages.blocks import BlockKey, client_salt, root_key
from mooncake.security.api_keys import ApiKey


@dataclass(frozen=True, slots=True)
class ChatPrefix:
    """The beginning of a conversation, and the tools of the whole conversation."""

    messages: Sequence[Message]
    tools: Sequence[ToolFields]

    def to_json(self) -> bytes:
        """Return the messages and tools as JSON, as `from_json` reads them."""
        return msgspec.json.encode(
            [
                [fields.model_dump(exclude_unset=True, warnings=False) for fields in several]
                for several in (self.messages, self.tools)
            ]
        )

    @classmethod
    def from_json(cls, data: bytes) -> "ChatPrefix":
        """Return the prefix that `to_json` has written."""
        messages, tools = msgspec.json.decode(data)
        return cls(
            [Message.model_validate(fields) for fields in messages],
            [ToolFields.model_validate(fields) for fields in tools],
        )


_TEMPLATE_FIELDS = frozenset({"add_generation_prompt", "messages", "tools"})
"""Variables of chat templates that `chat_template_kwargs` may not set."""
MAX_TOKENS_TOGETHER = 1 << 20
"""The most tokens of all prompts of one request, or the context length if that is more."""
_MAX_BRIEF_CHARS = 1 << 16
NO_PREFIX = ChatPrefix((), ())


def tenant_root(model: ServedModel, key: ApiKey | None, cache_salt: str | None) -> tuple[BlockKey, bool]:
    """Return the parent key of prompts' first blocks for this API key and salt, and whether there is a salt.

    Requests with one API key share blocks only if they have the same `cache_salt`. Requests of API keys with
    different salts never share blocks, whatever their `cache_salt` is.
    """
    if key is None:
        salt = client_salt(cache_salt)
    else:
        salt = f"{key.salt}\0{cache_salt}" if cache_salt else key.salt
    return root_key(model.fingerprint, salt), bool(salt)


def chat_prompt(
    before: ChatPrefix,
    messages: Sequence[Message],
    tools: Sequence[ToolFields],
    model: ServedModel,
    variables: Mapping[str, Any],
) -> list[int]:
    """Return the prompt of a conversation that continues the prefix `before`.

    Raises RequestError, also for a prompt that leaves no room for an answer.
    """
    prompt = chat_tokens(
        [*before.messages, *messages], tools, model, variables, num_before=len(before.messages)
    )
    check_token_ids(prompt, model, "messages")
    _check_room(prompt, model.context_len, "messages")
    return prompt


def chat_tokens(
    messages: Sequence[Message],
    tools: Sequence[ToolFields],
    model: ServedModel,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
    num_before: int = 0,
) -> list[int]:
    """Return the token ids of a conversation, by the model's chat template with these `variables`.

    The first `num_before` messages come from a context cache. Raises RequestError, whose text counts messages
    from the first one that is not from the cache.
    """
    _check_num_messages(len(messages), model)
    rendered = rendered_messages(messages, num_before)
    _check_num_chars(sum(len(entry["content"]) for entry in rendered), model, "messages")
    described = rendered_tools(tools)
    _check_num_chars(sum(len(json.dumps(tool)) for tool in described), model, "tools")
    at = None if model.template_takes_tools else index_of_tool_use(messages)
    if at is not None or (described and not model.template_takes_tools):
        if model.tool_format is None:
            path = "tools" if described or at is None else f"messages[{at - num_before}]"
            raise RequestError(
                f"{path}: this model's chat template has no place for tools; start the server with"
                " --http-tool-parser hermes to have them described in the system message",
                param=path,
                code="unsupported_parameter",
            )
        rendered, described = describe_tools(rendered, described), []
    _check_variables(variables, len(messages), model)
    if described:
        variables = {**variables, "tools": described}
    try:
        return model.tokenizer.render_chat(rendered, add_generation_prompt=add_generation_prompt, **variables)
    except RecursionError:
        raise RequestError(
            "the model's chat template calls itself without end, or what it gets is nested too deeply",
            param="messages",
            code="invalid_value",
        ) from None


def _check_variables(variables: Mapping[str, Any], num_messages: int, model: ServedModel) -> None:
    param = "chat_template_kwargs"
    if named := _TEMPLATE_FIELDS & variables.keys():
        raise RequestError(
            f"{param} cannot set {', '.join(sorted(named))}", param=param, code="invalid_value"
        )
    # A template may write variables beside each message: Llama 2's writes `bos_token`.
    _check_num_chars(num_messages * len(json.dumps(variables)), model, param)


def is_brief_conversation(num_messages: int, variables: Mapping[str, Any] | None) -> bool:
    """Return whether the variables of the chat template can add only little to a conversation's prompt.

    The template may repeat the variables with each message.
    """
    return not variables or num_messages * len(repr(variables)) <= _MAX_BRIEF_CHARS


def check_num_messages(fields: Mapping[str, object], model: ServedModel) -> None:
    """Check that a body has no more messages than the model's context has tokens. Raises RequestError."""
    messages = fields.get("messages")
    if isinstance(messages, list):
        _check_num_messages(len(messages), model)


def num_prompts_of(prompt: object) -> int:
    """Return the number of prompts in the field `prompt`."""
    return len(_many(prompt) or (prompt,))


def _many(prompt: object) -> list[object] | None:
    """Return the list of prompts; None if `prompt` is one prompt."""
    return prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else None


def prefix_tokens(prefix: ChatPrefix, model: ServedModel) -> list[int]:
    """Return the token ids of a conversation's beginning, without a generation prompt behind it.

    Raises RequestError.
    """
    tokens = chat_tokens(prefix.messages, prefix.tools, model, {}, add_generation_prompt=False)
    check_token_ids(tokens, model, "messages")
    _check_room(tokens, model.context_len, "messages")
    return tokens


def prompts_of(prompt: object, model: ServedModel, before: Sequence[int] = ()) -> list[list[int]]:
    """Return the prompts in the field `prompt`: a string, token ids, or a list of either.

    The token ids `before` are put before each prompt. Raises RequestError.
    """
    many = _many(prompt)
    given = [prompt] if many is None else many
    prompts, num_together = [], 0
    for index, item in enumerate(given):
        path = "prompt" if many is None else f"prompt[{index}]"
        if isinstance(item, str):
            token_ids = text_tokens(item, model, path, add_special_tokens=not before)
            is_known = model.tokenizer.vocab_size <= model.vocab_size
        elif isinstance(item, list):
            token_ids, is_known = item, False
        else:
            raise RequestError(
                f"{path}: expected a string, token ids, or a list of either", param=path, code="invalid_value"
            )
        if not token_ids:
            raise RequestError(f"{path} is empty", param=path, code="invalid_value")
        if not is_known:
            check_token_ids(token_ids, model, path)
        token_ids = [*before, *token_ids]
        _check_room(token_ids, model.context_len, path)
        num_together += len(token_ids)
        if num_together > max(MAX_TOKENS_TOGETHER, model.context_len):
            raise RequestError(
                f"the prompts of a request may have {MAX_TOKENS_TOGETHER} tokens together, and the first"
                f" {index + 1} have {num_together}; send several requests",
                param="prompt",
                code="invalid_value",
            )
        prompts.append(token_ids)
    return prompts


def text_tokens(text: str, model: ServedModel, path: str, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text.

    Raises RequestError for text that is too long, which names the field at `path`, and for text that the
    tokenizer refuses.
    """
    _check_num_chars(len(text), model, path)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_token_ids(token_ids: Sequence[object], model: ServedModel, path: str) -> None:
    """Check that all ids are tokens of the model. Raises RequestError that names the field at `path`."""
    vocab_size = min(model.vocab_size, model.tokenizer.vocab_size)
    if not token_ids or (_are_ints(token_ids) and min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            where = f"{path}[{index}]"
            raise RequestError(
                f"{where}: expected a token id from 0 to {vocab_size - 1}, "
                f"got {shortened(reprlib.repr(token_id))}",
                param=where,
                code="invalid_value",
            )


def _are_ints(values: Sequence[object]) -> TypeGuard[Sequence[int]]:
    return set(map(type, values)) == {int}


def _check_num_messages(num: int, model: ServedModel) -> None:
    if num > model.context_len:  # each takes at least one token
        raise _too_long(f"{num} messages", model.context_len, "messages")


def _check_num_chars(num_chars: int, model: ServedModel, path: str) -> None:
    """Check that text that is to be tokenized is not too long for any prompt. Raises RequestError."""
    if num_chars > model.context_len * model.tokenizer.max_token_chars:
        raise _too_long(f"{num_chars} characters", model.context_len, path)


def _check_room(prompt: Sequence[int], context_len: int, path: str) -> None:
    if len(prompt) >= context_len:
        raise _too_long(f"{len(prompt)} tokens", context_len, path)


def _too_long(size: str, context_len: int, path: str) -> RequestError:
    # LangChain recognises this error by "prompt is too long", LiteLLM by "this model's maximum ...".
    return RequestError(
        f"the prompt is too long: it has {size}, but this model's maximum context length is {context_len}"
        " tokens, the answer included; shorten it",
        param=path,
        code="context_length_exceeded",
    )
