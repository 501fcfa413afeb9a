"""Incremental text of byte-level tokens (GPT-2's kind), each of which stands for bytes by itself.

So the text of a stream is the UTF-8 of its tokens' bytes, decoded in a tenth of the time that decoding tokens
together takes (`tokenizer.IncrementalDetokenizer`). Rust's and Python's lossy decoders of UTF-8 agree on
which bytes are broken.

Owns: these bytes. Does not know: which tokens are to be hidden, requests.
"""

import codecs
import json
from collections.abc import Sequence, Set

from tokenizers import Tokenizer as Backend

from mooncake.model.token_bytes import BYTE_OF


class ByteLevelPieces(dict[int, bytes]):
    """The bytes of each token by id, computed at first use; empty outside the vocabulary."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id) or ""
        # As in the library's decoder, a piece with a character outside the alphabet stands for itself.
        is_written = all(character in BYTE_OF for character in piece)
        found = bytes(map(BYTE_OF.__getitem__, piece)) if is_written else piece.encode()
        self[token_id] = found
        return found


def pieces_of(backend: Backend) -> ByteLevelPieces | None:
    """Return the bytes of a tokenizer's tokens; None if the tokenizer's decoder is not byte-level."""
    kind = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    return ByteLevelPieces(backend) if kind.get("type") == "ByteLevel" else None


class ByteLevelDetokenizer:
    """A decoder of a stream of token ids into pieces of text; the start of a character is held back.

    The pieces together are `Tokenizer.decode` of all ids.
    """

    __slots__ = ("_decoder", "_hidden_ids", "_is_within_character", "_pieces")

    def __init__(self, pieces: ByteLevelPieces, hidden_ids: Set[int]) -> None:
        self._pieces, self._hidden_ids = pieces, hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within_character = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain after the next tokens, possibly empty."""
        pieces, hidden = self._pieces, self._hidden_ids
        if len(token_ids) == 1:  # as in almost every step
            data = pieces[token_ids[0]] if token_ids[0] not in hidden else b""
        else:
            data = b"".join([pieces[i] for i in token_ids if i not in hidden])
        if data.isascii() and not self._is_within_character:
            return data.decode()
        text = self._decoder.decode(data)
        self._is_within_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return the rest at the stream's end, an incomplete character as U+FFFD."""
        return self._decoder.decode(b"", final=True)
