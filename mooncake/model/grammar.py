"""Grammars, which decide the tokens that may come next in a text.

A grammar is a text in llguidance's Lark, JSON schemas included (`%json`). The front compiles it to check it,
workers compile it to draw by it. Both apply the same limits, so workers accept every grammar that the front
has accepted.

Owns: llguidance, its limits, the cache of grammars. Does not know: the use of grammars, logits.
"""

import asyncio
import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from mooncake.errors import GrammarError, MooncakeError
from mooncake.model.token_bytes import PieceBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

MAX_GRAMMAR_BYTES = 32 << 10
"""Bytes of the largest grammar, which compiles in at most 2 s, usually in 10 ms."""
_MAX_KEPT = 32
_LIMITS = llguidance.LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
# The other limits are llguidance's defaults: a mask takes at most some 20 ms, and usually 0.1 ms.
_MAX_REASON_CHARS = 300
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_SOURCE = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_UNREADABLE = re.compile(r'failed to parse "%json": (.*?)( at line \d+ column \d+)?')
_UNSERVED = re.compile(r"Unimplemented keys: \[(.*)\]")


class GrammarState:
    """The state of a grammar within one text. The allowed tokens depend on the tokens so far."""

    __slots__ = ("_bits", "_matcher", "_num_tokens", "error")

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = allocate_token_bitmask(1, vocab_size)
        self._num_tokens = 0
        self.error: str | None = None
        """The reason why the text cannot go on; None while it can go on.

        A token did not fit, or the grammar met a limit.
        """

    def allowed_after(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the bits of tokens that may follow `tokens`: uint8 `[4 * ceil(vocab_size / 32)]`.

        `tokens` begin with those of the previous call. Bit `i` of byte `j` stands for token `8 * j + i`. At
        the grammar's end, and after an error, only tokens that end a text may come. The next call overwrites
        the bits.
        """
        for token in tokens[self._num_tokens :]:
            if not self._matcher.is_stopped():  # tokens behind the grammar's end are not checked
                self._matcher.consume_token(token)
        self._num_tokens = len(tokens)
        fill_next_token_bitmask(self._matcher, self._bits)
        if self._matcher.is_error():
            self.error = self.error or _reason(self._matcher)
        allowed: np.ndarray = self._bits[0].view(np.uint8)
        return allowed


class Grammar:
    """A compiled grammar, from which states begin."""

    __slots__ = ("_matcher", "_vocab_size")

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def begin(self) -> GrammarState:
        """Return the state before a text's first token."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)


class Vocabulary:
    """The tokens that grammars choose from: all ids below the model's `vocab_size`.

    Construction takes about a second. It raises GrammarError if no token ends a text.
    """

    def __init__(self, backend: "Backend", eos_token_ids: Sequence[int], vocab_size: int) -> None:
        added = backend.get_added_tokens_decoder()
        bytes_of = PieceBytes(backend, added)
        ends = [token for token in eos_token_ids if token < vocab_size]
        if not ends:
            raise GrammarError("this model has no token that ends a text, so nothing can end by a grammar")
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.tokens = [bytes_of(token) for token in range(vocab_size)]
        self.special_token_ids = [
            token for token, of_token in added.items() if of_token.special and token < vocab_size
        ]
        self._backend = backend
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=vocab_size, eos_token=ends
        )

    def __call__(self, text: bytes) -> list[int]:
        """Return the usual token ids of a text, which llguidance uses where a grammar leaves no choice."""
        ids = self._encode(text.decode())
        if not any(token in self.special_token_ids for token in ids):
            return ids
        # Text that looks like a special token is encoded character by character.
        return [token for character in text.decode() for token in self._encode(character)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


class Grammars:
    """The compiler of grammars, in one thread of its own. The latest grammars are cached."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        """Prepare without a vocabulary.

        `load` is called by `prepare`, or else in the thread that compiles the first grammar.
        """
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        """The lock for all reads and changes of `_kept`."""

    def prepare(self) -> None:
        """Load the vocabulary now, so that no stream waits for it later.

        A failure is not raised here. The compilation of the first grammar loads again, and raises the error.
        """
        with contextlib.suppress(MooncakeError):
            self._vocabulary = self._load()

    async def get(self, text: str) -> Grammar:
        """Return the compiled grammar of `text`.

        Raises GrammarError that names the fault, or the error of `load`.
        """
        if (kept := self._kept_one(text)) is not None:
            return kept
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._get, text)

    def _get(self, text: str) -> Grammar:
        """Return the grammar of `text`. Runs in the compiler's thread.

        Of several requests for one grammar, only the first compiles it.
        """
        if (kept := self._kept_one(text)) is not None:
            return kept
        grammar = self.compile(text)
        with self._lock:
            self._kept[text] = grammar
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _kept_one(self, text: str) -> Grammar | None:
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
            return kept

    def compile(self, text: str) -> Grammar:
        """Return the grammar of `text`, compiled in the caller's thread and not cached.

        Raises GrammarError that names the fault, or the error of `load`.
        """
        if (num_bytes := len(text.encode())) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it has {num_bytes} bytes, and at most {MAX_GRAMMAR_BYTES} are allowed")
        if self._vocabulary is None:
            self._vocabulary = self._load()
        matcher = llguidance.LLMatcher(self._vocabulary.tokenizer, text, log_level=0, limits=_LIMITS)
        grammar = Grammar(matcher, self._vocabulary.tokenizer.vocab_size)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        if (error := _first_error(grammar)) is not None:
            raise GrammarError(error)
        return grammar


def _first_error(grammar: Grammar) -> str | None:
    """Return the error that a grammar meets at its first token; None without one.

    The grammar may exceed a limit there.
    """
    state = grammar.begin()
    state.allowed_after([])
    return state.error


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Return llguidance's error without the grammar's source.

    Clients did not write this source: they wrote a schema.
    """
    text = matcher.get_error().replace("<non-verbose/>", "")
    reason = " ".join(_PLACE.sub("", _SOURCE.sub("", text)).split())
    if reason == "NoExtensionBias":
        reason = "a reference ($ref) leads back to itself, with nothing in between to write"
    elif (unserved := _UNSERVED.fullmatch(reason)) is not None:
        reason = f"the schema has keywords that cannot be held to: {unserved[1]}"
    elif (unreadable := _UNREADABLE.fullmatch(reason)) is not None:
        is_deep = unreadable[1] == "recursion limit exceeded"
        reason = f"the schema cannot be read: {'it is nested too deeply' if is_deep else unreadable[1]}"
    reason = reason or "a token does not fit"
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[:_MAX_REASON_CHARS] + "..."
