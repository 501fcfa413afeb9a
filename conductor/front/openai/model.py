"""The model as the front sees it: a tokenizer and a few numbers.

Owns: the facts of a model that the front needs. Does not know: weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from conductor.front.openai.tool_calls import ToolFormat, format_of_template, takes_tools
from mooncake.messages.blocks import KVDtype
from mooncake.model.checkpoint import Checkpoint
from mooncake.model.grammar import Grammars
from mooncake.model.tokenizer import load_tokenizer


class FrontTokenizer(Protocol):
    """The part of the interface of `mooncake.model.tokenizer.Tokenizer` that the front needs.

    The methods may be called from several threads.
    """

    vocab_size: int
    max_token_chars: int
    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, so that `render_chat` works."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return the bytes of a token. They may end or begin within a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raises RequestError."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """Return the token ids of a conversation, by the model's chat template.

        `template_kwargs` are the template's variables. Raises RequestError.
        """


class Detokenizer(Protocol):
    """A decoder that turns one growing token sequence into text, in whole characters."""

    def push(self, ids: Sequence[int], /) -> str:
        """Return the text that these token ids complete."""

    def flush(self) -> str:
        """Return the text that is held back at the end; U+FFFD for an incomplete character."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as the front knows it: its tokenizer, and limits of token ids and lengths.

    `context_len` and `block_size` are in tokens. `new_detokenizer` makes the detokenizer of a choice; its
    argument says whether special tokens are left out of the text.

    The model has weights for token ids below `vocab_size`. Its tokenizer may have more or fewer ids.
    """

    tokenizer: FrontTokenizer
    new_detokenizer: Callable[[bool], Detokenizer]
    context_len: int
    vocab_size: int
    fingerprint: str
    block_size: int
    grammars: Grammars
    tool_format: ToolFormat | None = None
    """The format in which the model writes tool calls; None if it is unknown."""
    template_takes_tools: bool = True

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token that is written `text`; None if there is none."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens[0] if len(tokens) == 1 and tokens[0] in self.tokenizer.special_token_ids else None


def load_served_model(
    checkpoint: Checkpoint, dtype: KVDtype, block_size: int, tool_format: ToolFormat | None = None
) -> ServedModel:
    """Load the checkpoint's tokenizer and limits.

    `tool_format` is the format of tool calls; None for the format that the chat template shows.

    Raises ModelError.
    """
    tokenizer = load_tokenizer(checkpoint)
    template = tokenizer.chat_template
    vocab_size = checkpoint.model.vocab_size
    grammars = Grammars(lambda: tokenizer.vocabulary(vocab_size))
    grammars.prepare()
    return ServedModel(
        tokenizer=tokenizer,
        new_detokenizer=tokenizer.detokenizer,
        context_len=checkpoint.context_len,
        vocab_size=vocab_size,
        fingerprint=checkpoint.fingerprint(dtype, block_size),
        block_size=block_size,
        grammars=grammars,
        tool_format=tool_format or format_of_template(template),
        template_takes_tools=takes_tools(template),
    )
