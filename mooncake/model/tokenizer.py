"""The tokenizer: text to token ids and back, as the model's publisher defines it.

Owns: a checkpoint's tokenizer and chat template behind a few calls, and when a streamed piece of text is
certain. Does not know: HTTP, stop strings. transformers is imported with the first tokenizer, torch never.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend

from mooncake.errors import ModelError, MooncakeError, RequestError, first_line, is_panic
from mooncake.model.byte_level import ByteLevelDetokenizer, pieces_of
from mooncake.model.checkpoint import Checkpoint
from mooncake.model.encoder import Encoder
from mooncake.model.gguf_file import read_gguf_header
from mooncake.model.gguf_tokenizer import build_tokenizer
from mooncake.model.grammar import Vocabulary
from mooncake.model.token_bytes import PieceBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so an incomplete one shows as at most three replacement characters.
_MAX_CHARS_IN_FLIGHT = 3
_CONTEXT_TOKENS = 8
# Several times the lengths of real tokens. The encoder is tried on every beginning of every added token.
_MAX_TOKEN_CHARS = 1024
_MAX_ADDED_CHARS_SQUARED = 1 << 26
_MAX_TOKENS_AROUND = 64  # of each text: a few special ones at its ends
_MAX_WINDOW_TOKENS = 16  # while characters become complete
_MAX_BROKEN_TOKENS = 32  # when so many tokens end in replacement characters, the bytes are not UTF-8 at all

# Arguments of transformers' `apply_chat_template` that are not the template's variables. A request that could
# set them would choose the template, or another type of answer.
_RESERVED_KWARGS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads at once: no call changes it.

    `vocab_size` bounds all token ids; no token stands for more than `max_token_chars` characters.
    """

    __slots__ = (
        "_backend",
        "_byte_level_pieces",
        "_bytes_of_piece",
        "_encoder",
        "_wrapped",
        "eos_token_ids",
        "max_token_chars",
        "special_token_ids",
        "vocab_size",
    )

    def __init__(self, wrapped: "PreTrainedTokenizerFast", eos_token_ids: tuple[int, ...]) -> None:
        self._wrapped = wrapped
        self._backend = wrapped.backend_tokenizer
        # A tokenizer.json may carry its training set-up; a prompt must never be cut or filled up silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._encoder = Encoder(self._backend)
        self.eos_token_ids: tuple[int, ...] = eos_token_ids
        # One more than the largest id: some vocabularies have holes, so their count is too small.
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        # Byte-level vocabularies write a token with one character a byte, so it never stands for more.
        self.max_token_chars: int = max(map(len, vocabulary))
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes_of_piece = PieceBytes(self._backend, added)
        self._byte_level_pieces = pieces_of(self._backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, which `render_chat` needs."""
        return self._wrapped.chat_template is not None

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """Return the tokens that grammars choose from, for a model of this `vocab_size`."""
        return Vocabulary(self._backend, self.eos_token_ids, vocab_size)

    @property
    def chat_template(self) -> str:
        """The source of the chat template, or of all chat templates; empty without one."""
        template = self._wrapped.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens written out in the text become those tokens.

        `add_special_tokens`: add the special tokens that the model wants around a text, such as bos. Raises
        RequestError for text that is no valid Unicode (lone surrogates), or that the tokenizer fails on.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text is no valid Unicode: {error.reason} at character {error.start}"
            ) from error
        return self._encoder.encode(text, add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, maybe a part of a character; empty outside the vocabulary."""
        return self._bytes_of_piece(token_id)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """Return a conversation's token ids by the model's chat template, ready for the answer.

        `template_kwargs` are the template's variables: `tools`, `enable_thinking`, `add_generation_prompt`...
        Raises RequestError (param "messages") if the template refuses the conversation or there is no
        template, and RequestError (param "chat_template_kwargs") for a name in `_RESERVED_KWARGS`.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        if reserved := _RESERVED_KWARGS & template_kwargs.keys():
            raise RequestError(
                f"{', '.join(sorted(reserved))} cannot be set by a request",
                param="chat_template_kwargs",
                code="invalid_value",
            )
        try:
            text = self._wrapped.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                **{"add_generation_prompt": True, **template_kwargs},
            )
        # Templates are programs: beside their own refusals they add None to text or index what is not there.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"the model's chat template refused: {error}", param="messages") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, skip_special_tokens: bool = True
    ) -> "IncrementalDetokenizer | ByteLevelDetokenizer":
        """Return a new detokenizer for one stream of tokens."""
        if self._byte_level_pieces is None:
            return IncrementalDetokenizer(self, skip_special_tokens)
        hidden_ids = self.special_token_ids if skip_special_tokens else frozenset()
        return ByteLevelDetokenizer(self._byte_level_pieces, hidden_ids)


class IncrementalDetokenizer:
    """A decoder of a stream of token ids into pieces of text.

    The pieces together are `Tokenizer.decode` of all ids, with one exception: with SentencePiece's byte
    fallback, bytes that never become a character also spoil the whole characters right before them in the
    text of `decode`. The stream has returned these characters by then.

    Text is returned as soon as later tokens cannot change it: the start of a multi-byte character is held
    back. A window of recent tokens is decoded each time, with some tokens whose text has been returned
    already, as a token's text may depend on its neighbours. So a token costs the same however long the stream
    is.

    Invariant: `_num_emitted <= len(decode(_window))`; the first `_num_emitted` characters of
    `decode(_window)` have been returned.
    """

    __slots__ = ("_hidden_ids", "_num_emitted", "_skip_special_tokens", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._hidden_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_emitted = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain after the next tokens, possibly empty."""
        vocab_size = self._tokenizer.vocab_size
        # Tokens without text must not push those that have some out of the window.
        visible = [i for i in token_ids if i < vocab_size and i not in self._hidden_ids]
        if not visible:
            return ""
        self._window += visible
        text = self._decode(self._window)
        num_certain, max_tokens = len(text), _MAX_WINDOW_TOKENS
        if text.endswith(_REPLACEMENT):
            max_tokens = _MAX_BROKEN_TOKENS
            if len(self._window) <= max_tokens:
                # The whole run: byte fallback also shows complete characters before the incomplete one so.
                num_certain = len(text.rstrip(_REPLACEMENT))
            else:
                num_certain -= _MAX_CHARS_IN_FLIGHT
        piece = text[self._num_emitted : num_certain]
        self._num_emitted = max(self._num_emitted, num_certain)
        if len(self._window) > max_tokens:
            self._shorten_window(text)
        return piece

    def flush(self) -> str:
        """Return the rest at the stream's end: held-back text, incomplete characters as U+FFFD."""
        rest = self._decode(self._window)[self._num_emitted :]
        self._window, self._num_emitted = [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _shorten_window(self, text: str) -> None:
        """Drop old tokens from the window if the rest, decoded alone, gives the same end of the text.

        More than `_MAX_CHARS_IN_FLIGHT` characters must remain, so that an incomplete character is wholly
        inside the window.
        """
        for num_kept in range(_CONTEXT_TOKENS, _MAX_WINDOW_TOKENS):
            tail = self._decode(self._window[-num_kept:])
            if len(tail) > _MAX_CHARS_IN_FLIGHT and text.endswith(tail):
                self._window = self._window[-num_kept:]
                self._num_emitted -= len(text) - len(tail)
                return


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of `checkpoint`. Raises ModelError if it is missing or damaged."""
    with _damage_told(checkpoint):
        wrapped = _from_gguf(checkpoint) if _is_gguf(checkpoint) else _from_directory(checkpoint)
        _check(checkpoint, wrapped)
        eos_token_ids = checkpoint.eos_token_ids
        if not eos_token_ids and wrapped.eos_token_id is not None:
            eos_token_ids = (wrapped.eos_token_id,)
        return Tokenizer(wrapped, eos_token_ids)


def load_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Return the tokens that grammars choose from, loaded without transformers where possible.

    Raises ModelError as `load_tokenizer` does, and GrammarError if no token ends a text.
    """
    vocab_size, eos_token_ids = checkpoint.model.vocab_size, checkpoint.eos_token_ids
    file = checkpoint.path / "tokenizer.json"
    with _damage_told(checkpoint):
        if eos_token_ids and file.is_file():
            return Vocabulary(Backend.from_file(str(file)), eos_token_ids, vocab_size)
        if eos_token_ids and _is_gguf(checkpoint):
            backend = build_tokenizer(read_gguf_header(checkpoint.path))
            return Vocabulary(backend, eos_token_ids, vocab_size)
    return load_tokenizer(checkpoint).vocabulary(vocab_size)


def _is_gguf(checkpoint: Checkpoint) -> bool:
    return checkpoint.path.suffix == ".gguf" and checkpoint.path.is_file()


@contextlib.contextmanager
def _damage_told(checkpoint: Checkpoint) -> Iterator[None]:
    """Make a context that turns an error or a panic of `tokenizers` into a ModelError that names the file."""
    try:
        yield
    except MooncakeError:
        raise
    except BaseException as error:  # `tokenizers` raises bare Exception for a damaged file, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(
            f"{checkpoint.path} has no tokenizer that can be loaded ({first_line(error)}); put tokenizer.json"
            " beside config.json"
        ) from None


def _check(checkpoint: Checkpoint, wrapped: "PreTrainedTokenizerFast") -> None:
    """Check that the tokenizer's tokens fit the model, and that its time and memory are bounded.

    The model must have weights for the tokens. Added tokens may have larger ids: some publishers add a
    padding token. A request with such a token is refused. Raises ModelError.
    """
    path, backend = checkpoint.path, wrapped.backend_tokenizer
    plain: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    largest = max(plain.values(), default=-1)
    if largest >= checkpoint.model.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has tokens up to id {largest}, but vocab_size is"
            f" {checkpoint.model.vocab_size}: they do not belong to one model"
        )
    if not plain:
        raise ModelError(f"{path}: the tokenizer has no tokens")
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    if longest > _MAX_TOKEN_CHARS:
        raise ModelError(
            f"{path}: a token of the tokenizer has {longest} characters, expected at most {_MAX_TOKEN_CHARS}"
        )
    added = backend.get_added_tokens_decoder().values()
    if sum(len(token.content) ** 2 for token in added) > _MAX_ADDED_CHARS_SQUARED:
        raise ModelError(f"{path}: the tokenizer's {len(added)} added tokens are too many of that length")
    if (num_around := backend.num_special_tokens_to_add(is_pair=False)) > _MAX_TOKENS_AROUND:
        raise ModelError(
            f"{path}: the tokenizer adds {num_around} tokens to each text, expected at most"
            f" {_MAX_TOKENS_AROUND}"
        )
    unknown = [token_id for token_id in backend.encode("").ids if backend.id_to_token(token_id) is None]
    if unknown:
        raise ModelError(f"{path}: the tokenizer adds the token {unknown[0]} to each text and has none such")
    template = wrapped.chat_template
    templates = template.values() if isinstance(template, dict) else [template]
    if not all(isinstance(each, str | None) for each in templates):
        raise ModelError(f"{path}: its chat template is {type(template).__name__}, expected text")


def _from_gguf(checkpoint: Checkpoint) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    header = read_gguf_header(checkpoint.path)
    backend = build_tokenizer(header)

    def token(kind: str) -> str | None:
        token_id = header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return None if token_id is None else backend.id_to_token(token_id)

    # Not pad and unknown: transformers makes special tokens of them, and some files name an ordinary token.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token("bos"),
        eos_token=token("eos"),
        chat_template=header.metadata.get("tokenizer.chat_template"),
    )


def _from_directory(checkpoint: Checkpoint) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = checkpoint.path
    if (path / "tokenizer.json").is_file():
        # The published file, unchanged: AutoTokenizer rebuilds some families' tokenizers in its own way.
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    wrapped = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if not isinstance(wrapped, PreTrainedTokenizerFast):
        raise ModelError(
            f"{path}: its tokenizer has no tokenizer.json form; convert it with transformers first"
        )
    return wrapped
