"""ASCII text to tokens by looking up its pieces, in a tenth of the time that the tokenizer itself takes.

Byte-level BPE cuts a text into pieces (a word with the space before it, a number, punctuation), and what
becomes of a piece depends on nothing else. Most pieces of a text have been met before. Here a text is cut as
the tokenizer would cut it; only ASCII, where Python and the tokenizer's Oniguruma agree on what letters,
digits and white space are.

Owns: the ways of cutting that are known, the pieces' tokens. Does not know: other texts, other tokenizers.
"""

import json
import re
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from mooncake.gguf_tokenizer import EACH_DIGIT, UP_TO_THREE_DIGITS
from mooncake.token_bytes import BYTE_OF

MAX_CHARS = 1 << 15
"""of a text: cutting one holds up all other threads, by 15 ns a character"""
_MAX_PIECES = 1 << 16
_MAX_PIECE_CHARS = 32
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_BETWEEN_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""where each digit has been cut out before, so that what is beside it is an end"""
_CLASSES = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}
_WRITTEN = str.maketrans({chr(byte): character for character, byte in BYTE_OF.items() if byte < 128})


class AsciiPieces:
    """Of one tokenizer. Safe to use from several threads at once."""

    def __init__(self, backend: Backend, pattern: str) -> None:
        self._cut = re.compile(_of_ascii(pattern), re.ASCII).findall
        added = {token.content: [token_id] for token_id, token in backend.get_added_tokens_decoder().items()}
        longest_first = sorted(map(re.escape, added), key=len, reverse=True)
        self._cut_out_added = re.compile(f"({'|'.join(longest_first)})").split if added else None
        self._ids_of = _PieceIds(backend.model, added)
        self._before, self._after = _special_tokens_around(backend)

    def encode(self, text: str, add_special_tokens: bool) -> list[int] | None:
        """Token ids; None for a text that is too long or not ASCII."""
        if len(text) > MAX_CHARS or not text.isascii():
            return None
        pieces: list[str] = []
        for index, part in enumerate([text] if self._cut_out_added is None else self._cut_out_added(text)):
            pieces += [part] if index % 2 else self._cut(part)  # every other part is an added token
        ids = chain.from_iterable(map(self._ids_of.__getitem__, pieces))
        return [*self._before, *ids, *self._after] if add_special_tokens else list(ids)


class _PieceIds(dict[str, list[int]]):
    """The tokens of each piece, found when it is first asked for."""

    def __init__(self, model: Any, added: dict[str, list[int]]) -> None:
        super().__init__()
        self._tokenize, self._added = model.tokenize, added

    def __missing__(self, piece: str) -> list[int]:
        found = self._added.get(piece)
        if found is None:
            found = [token.id for token in self._tokenize(piece.translate(_WRITTEN))]
        if len(self) >= _MAX_PIECES:
            self.clear()
        if len(piece) <= _MAX_PIECE_CHARS:
            self[piece] = found
        return found


def ascii_pieces_of(backend: Backend) -> AsciiPieces | None:
    """None for a tokenizer that cuts in another way, or whose tokens depend on more than their piece."""
    is_plain = (
        isinstance(backend.normalizer, normalizers.NFC | None)
        and isinstance(backend.model, models.BPE)
        and backend.model.dropout is None
    )
    pattern = _pattern_of(backend)
    takes_more = any(
        token.normalized or token.lstrip or token.rstrip or token.single_word
        for token in backend.get_added_tokens_decoder().values()
    )
    return AsciiPieces(backend, pattern) if is_plain and pattern is not None and not takes_more else None


def _pattern_of(backend: Backend) -> str | None:
    """By what a text is cut into pieces, one after the other."""
    cutter = backend.pre_tokenizer
    match json.loads(cutter.__getstate__()) if cutter is not None else None:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        }:
            return _GPT2_BETWEEN_DIGITS
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in (UP_TO_THREE_DIGITS, EACH_DIGIT):
            return pattern
    return None


def _of_ascii(pattern: str) -> str:
    """The same for `re`, in ASCII."""

    def written(found: re.Match[str]) -> str:
        part = found[0]
        for name, characters in _CLASSES.items():
            part = part.replace(name, characters if part.startswith("[") else f"[{characters}]")
        return part

    return re.sub(r"\[[^]]*\]|\\p\{.\}", written, pattern)


def _special_tokens_around(backend: Backend) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind any text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]
