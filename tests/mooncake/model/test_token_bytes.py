"""A token's own bytes: joined, they are the text."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from mooncake.model.token_bytes import PieceBytes
from tests.tiny_tokenizer import IM_END_ID, tiny_backend


@pytest.mark.parametrize("text", ["The café", " 日本語 🎉\n\t", "".join(map(chr, range(300)))])
def test_byte_level_tokens_join_to_the_text(text: str) -> None:
    backend = tiny_backend()
    token_bytes = PieceBytes(backend, backend.get_added_tokens_decoder())
    token_ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(map(token_bytes, token_ids)) == text.encode()


def test_added_tokens_are_written_as_they_are_and_unknown_ones_are_nothing() -> None:
    backend = tiny_backend()
    token_bytes = PieceBytes(backend, backend.get_added_tokens_decoder())
    assert token_bytes(IM_END_ID) == b"<|im_end|>"
    assert token_bytes(10**6) == b""


def test_sentencepiece_has_spaces_and_bytes() -> None:
    backend = Backend(models.BPE({"\u2581The": 0, "\u2581": 1, "<0xC3>": 2, "<0xA9>": 3, "é": 4}, []))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    token_bytes = PieceBytes(backend, ())
    assert [token_bytes(i) for i in range(5)] == [b" The", b" ", b"\xc3", b"\xa9", "é".encode()]
