"""The encoder of text to token ids, by one of two libraries: fastokens, or Hugging Face's `tokenizers`.

fastokens takes a fifth of the time. It refuses most features of a tokenizer.json that it does not know, but
not all. So both libraries encode texts of all kinds first, and fastokens is used for a tokenizer only if all
token ids are the same.

Owns: which library encodes, the texts on which the libraries are compared. Does not know: templates,
decoding, requests.
"""

import json
import logging
import os
import random
import re
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

import fastokens
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from mooncake.errors import RequestError, first_line, is_panic

# The libraries' regexes differ in these: U+180E is white space to one of them, and a long s (or the kelvin
# sign) is an s (or a k) in another case. The last ones are numbers since Unicode 17.
_DISPUTED = re.compile("[\u180e\u017f\u212a\U00011de0-\U00011de9\U00016ff4-\U00016ff6]")
_CODE_POINTS = (*range(0x100), *range(0x100, 0xD800, 151), *range(0xE000, 0x32000, 151), 0xE0041, 0x10FFFF)
# Pieces that the regexes of pre-tokenizers name, or that libraries have split wrongly.
_PIECES = (
    *("the", " a", "Z", "é", "e\u0301", "ǅ", "日本", "ア", "한", "א", "हि", "ไทย", "ﬁ"),
    *("1", "23", "٣", "½", "Ⅷ", "𝟙"),
    *(" ", "  ", "     ", "\t", "\n", "\n\n", "\r\n", "\x0b", "\x1c", "\x85"),
    *("\u00a0", "\u2003", "\u2028", "\u3000"),
    *("\x00", "\x7f", "\u00ad", "\u200b", "\u200d", "\ufeff", "\ufffd", "\ue000"),
    *("'s", "'LL", "’re", "__", "-", "!", "...", "—", "€", "+=", "/", "\u2581", "Ġ", "<|", "|>"),
    *("🎉", "👩\u200d👩\u200d👧", "🇩🇪", "1\ufe0f\u20e3"),
)
# GPT-2's regex, as after a split at each digit: white space before a digit is like that at a text's end.
_DIGITS_AND_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
_NUM_MIXED_TEXTS = 64
_MIXED_TOGETHER = 64
_END = "</w>"

log = logging.getLogger(__name__)


class Encoder:
    """The encoder of a finished tokenizer, safe to use from several threads at once."""

    __slots__ = ("_backend", "_quick")

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._quick = _trusted(backend)

    @property
    def is_quick(self) -> bool:
        """Whether the library fastokens encodes, rather than `tokenizers`."""
        return self._quick is not None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, the same as `Backend.encode` for valid Unicode.

        Raises RequestError if the text cannot be encoded.
        """
        if self._quick is not None and (text.isascii() or _DISPUTED.search(text) is None):
            try:
                return _quickly(self._quick, text, add_special_tokens)
            except ValueError as error:  # a byte that is no token; a regex that white space is too long for
                log.info("fastokens gave up on a text of %d characters: %s", len(text), error)
        return _surely(self._backend, text, add_special_tokens)


def _quickly(quick: fastokens.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids that fastokens gives. Raises ValueError."""
    try:
        ids: list[int] = quick.encode(text, add_special_tokens).ids
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError(f"it panicked: {error}") from None
    return ids


def _surely(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    try:
        # As a batch of one: only batches let other threads run meanwhile.
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise RequestError(f"the model's tokenizer cannot read this text: {first_line(error)}") from None
    ids: list[int] = encoding.ids
    return ids


def _trusted(backend: Backend) -> fastokens.Tokenizer | None:
    """Return fastokens' form of the tokenizer; None unless it gives the same ids as the tokenizer."""
    # fastokens reads it with its first long text. A prompt gets one core: workers compute on the others.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    try:
        fields = json.loads(backend.to_str())
        quicker = _in_one_split(fields)
        quick = fastokens.Tokenizer.from_json_str(json.dumps(quicker))
        splits = Backend.from_str(json.dumps(_showing_ends(fields)))
        quick_splits = fastokens.Tokenizer.from_json_str(json.dumps(_showing_ends(quicker)))
        _compare(splits, quick_splits, _characters())
        _compare(backend, quick, _mixed(backend))
    except ValueError as error:
        log.warning("texts are encoded by tokenizers, which takes longer than fastokens: %s", error)
        return None
    return quick


def _in_one_split(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` (a tokenizer.json) with one regex in place of a split at digits and a split at words.

    The one regex takes a third of the time. A tokenizer.json that splits in another way is returned
    unchanged.
    """
    match fields["pre_tokenizer"]:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True} as byte_level,
            ],
        }:
            split = {"type": "Split", "pattern": {"Regex": _DIGITS_AND_GPT2}, "behavior": "Isolated"}
            steps = [{**split, "invert": False}, {**byte_level, "use_regex": False}]
            return {**fields, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    return fields


def _compare(backend: Backend, quick: fastokens.Tokenizer, texts: Iterable[str]) -> None:
    """Check that two encoders give the same ids for `texts`.

    Raises ValueError that names the first difference.
    """
    for text in texts:
        if _quickly(quick, text, True) != _surely(backend, text, True) and _DISPUTED.search(text) is None:
            raise ValueError(f"it gives other ids for {reprlib.repr(text)}")


def _showing_ends(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json `fields` with a vocabulary of single bytes, whose ids show every split.

    A byte at the end of a piece has another token than the same byte elsewhere. With the tokenizer's own
    merges most splits would not show in the ids.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(byte + _END for byte in alphabet)]
    model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []}
    return {
        **fields,
        "model": {**model, "end_of_word_suffix": _END},
        "added_tokens": [],
        "post_processor": None,
    }


def _characters() -> Iterator[str]:
    """Yield characters from all over Unicode, each beside letters, digits, white space and others."""
    for character in map(chr, _CODE_POINTS):
        yield f"a{character}b  {character} 1{character}'{character}{character}! {character}x\n{character}"


def _mixed(backend: Backend) -> Iterator[str]:
    """Yield texts in which each piece or added token stands beside others, and texts of random tokens."""
    added = list(backend.get_added_tokens_decoder().values())
    pieces = [*_PIECES, *(token.content for token in added)]
    for piece in pieces:
        yield f"{piece} {piece}a{piece}1{piece}{piece}\n {piece}!  {piece}"
    yield from _overlaps(added)
    drawn = random.Random(0)
    for _ in range(_NUM_MIXED_TEXTS):
        yield "".join(drawn.choices(pieces, k=_MIXED_TOGETHER))
        yield backend.decode(drawn.choices(range(backend.get_vocab_size()), k=_MIXED_TOGETHER))


def _overlaps(added: list[AddedToken]) -> Iterator[str]:
    """Yield texts in which one added token begins within another.

    Which of the two tokens an encoder finds depends on the order in which it looks for them.
    """
    begun = {
        (token.content[:size], token.normalized): token.content
        for token in added
        for size in range(1, len(token.content))
    }
    for token in added:
        for size in range(1, len(token.content)):
            other = begun.get((token.content[-size:], not token.normalized))
            if other is not None:
                yield token.content + other[size:]
