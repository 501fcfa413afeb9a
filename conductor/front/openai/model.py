"""The model as the front sees it: a tokenizer and a few numbers.

Owns: what the front needs of a model. Does not know: weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from conductor.front.openai.tool_calls import ToolFormat, format_of_template, takes_tools
from mooncake.messages.blocks import KVDtype
from mooncake.model.checkpoint import Checkpoint
from mooncake.model.grammar import Grammars
from mooncake.model.tokenizer import load_tokenizer


class Tokenizer(Protocol):
    """Interface of a tokenizer that the front needs; `mooncake.model.tokenizer.Tokenizer` has it. Called from
    threads.
    """

    vocab_size: int
    max_token_chars: int
    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return the bytes that a token stands for; a part of a character is no UTF-8."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raises RequestError."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. `template_kwargs` are the template's
        variables. Raises RequestError."""


class Detokenizer(Protocol):
    """Text of one growing token sequence; never gives out a part of a character."""

    def push(self, ids: Sequence[int], /) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return the text still held back, at the end; U+FFFD for a character that was never completed."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as the front knows it: its tokenizer, and what the tokenizer's output may be.

    `context_len` and `block_size` in tokens; `new_detokenizer` makes the one of a choice, with which
    special tokens are hidden or not.

    The model has weights for token ids below `vocab_size`; its tokenizer may know more of them, or fewer.
    """

    tokenizer: Tokenizer
    new_detokenizer: Callable[[bool], Detokenizer]
    context_len: int
    vocab_size: int
    fingerprint: str
    block_size: int
    grammars: Grammars
    tool_format: ToolFormat | None = None
    """Format in which the model writes tool calls, if that is known."""
    template_takes_tools: bool = True

    def special_token(self, text: str) -> int | None:
        """Return the special token that is written `text`."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens[0] if len(tokens) == 1 and tokens[0] in self.tokenizer.special_token_ids else None


def load_served_model(
    checkpoint: Checkpoint, dtype: KVDtype, block_size: int, tool_format: ToolFormat | None = None
) -> ServedModel:
    """Load the checkpoint's tokenizer. `tool_format`: how it writes calls, whatever its template shows.

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
