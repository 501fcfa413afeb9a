"""The bytes of single tokens, which vocabularies write as characters.

Byte-level vocabularies (GPT-2's) write each byte as a character of its own. SentencePiece's vocabularies
write a space as "\u2581", and a byte that is in no other piece as "<0xE2>".

Owns: these two notations. Does not know: text of several tokens (`tokenizer`).
"""

import contextlib
import json
import re
from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceBytes:
    """The bytes of a tokenizer's tokens by id. Tokens in `added` are written as they are."""

    __slots__ = ("_added", "_backend", "_is_byte_level")

    def __init__(self, backend: "Backend", added: Container[int]) -> None:
        self._backend, self._added = backend, added
        decoder = backend.decoder
        kinds = json.loads(decoder.__getstate__()) if decoder is not None else {}
        self._is_byte_level = any(
            step.get("type") == "ByteLevel" for step in (kinds, *kinds.get("decoders", ()))
        )

    def __call__(self, token_id: int) -> bytes:
        """Return a token's bytes; empty outside the vocabulary."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self._is_byte_level:
            with contextlib.suppress(UnicodeEncodeError):
                return piece.translate(_LATIN_1_OF).encode("latin-1")
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace(_SPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE.

    Printable Latin-1 stands for itself, and characters from 256 on stand for the other bytes, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF = _byte_level_alphabet()
_LATIN_1_OF = dict.fromkeys(range(256), "\uffff") | {
    ord(character): chr(byte) for character, byte in BYTE_OF.items()
}
"""A translation of each byte-level character to its byte as a Latin-1 character.

Other characters below U+0100 become U+FFFF, which Latin-1 lacks.
"""
