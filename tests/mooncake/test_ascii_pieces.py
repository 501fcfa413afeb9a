"""Looked up piece by piece a text has the very tokens that the tokenizer itself gives it."""

import string
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from mooncake import ascii_pieces
from mooncake.ascii_pieces import AsciiPieces, ascii_pieces_of
from mooncake.checkpoint import open_checkpoint
from mooncake.gguf_tokenizer import _PRE_TOKENIZERS
from mooncake.tokenizer import load_tokenizer
from tests.tiny_tokenizer import SPECIAL_TOKENS, tiny_backend


def of_kind(kind: str) -> Tokenizer:
    backend = tiny_backend()
    backend.pre_tokenizer = _PRE_TOKENIZERS[kind].build()
    return backend


BACKENDS = {kind: of_kind(kind) for kind in _PRE_TOKENIZERS}
LIKELY = (
    "'s",
    "'LL",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\x1c",
    "\x00",
    "word",
    "The",
    "12345",
    "...",
    *SPECIAL_TOKENS,
)
TEXTS = st.lists(
    st.sampled_from((*LIKELY, *SPECIAL_TOKENS)) | st.text(string.printable, max_size=6), max_size=20
).map("".join)
ALL_ASCII = "".join(map(chr, range(128)))


def known(backend: Tokenizer) -> AsciiPieces:
    pieces = ascii_pieces_of(backend)
    assert pieces is not None
    return pieces


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
@example(text=ALL_ASCII)
@example(text=" ".join(ALL_ASCII))
@example(text="  ".join(ALL_ASCII))
def test_tokens_are_the_tokenizers(kind: str, text: str) -> None:
    backend = BACKENDS[kind]
    assert known(backend).encode(text, add_special_tokens=False) == backend.encode(text).ids


def test_the_default_models_tokenizer_is_known() -> None:
    backend = load_tokenizer(open_checkpoint(None))._backend
    text = "<|im_start|>user\nIt's 3.5  times\n\n  what 2024's\tprice was!<|im_end|>\n" + ALL_ASCII
    assert known(backend).encode(text, add_special_tokens=True) == backend.encode(text).ids


def test_tokens_around_a_text_are_added_if_wanted() -> None:
    backend = of_kind("llama-bpe")
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|im_end|>", pair=None, special_tokens=[("<|bos|>", 0), ("<|im_end|>", 2)]
    )
    pieces = known(backend)
    for text in ("", "Tell me"):
        for wanted in (True, False):
            assert pieces.encode(text, wanted) == backend.encode(text, add_special_tokens=wanted).ids


def test_other_texts_are_left_to_the_tokenizer() -> None:
    pieces = known(BACKENDS["gpt-2"])
    assert pieces.encode("naïve", add_special_tokens=False) is None
    assert pieces.encode("a" * (ascii_pieces.MAX_CHARS + 1), add_special_tokens=False) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda backend: setattr(backend.model, "dropout", 0.5),
        lambda backend: backend.add_tokens([AddedToken("moon", lstrip=True, normalized=False)]),
        lambda backend: backend.add_tokens([AddedToken("moon", normalized=True)]),
    ],
)
def test_other_tokenizers_are_not_imitated(change: Callable[[Tokenizer], None]) -> None:
    backend = tiny_backend()
    change(backend)
    assert ascii_pieces_of(backend) is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascii_pieces, "_MAX_PIECES", 4)
    backend = BACKENDS["smollm"]
    pieces = known(backend)
    text = "one two three four five six seven <|im_end|> one " + "long" * 20
    for _ in range(2):
        assert pieces.encode(text, add_special_tokens=False) == backend.encode(text).ids
        assert len(pieces._ids_of) <= 4
