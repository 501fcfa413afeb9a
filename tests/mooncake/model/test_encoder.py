import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from mooncake.errors import RequestError
from mooncake.model.checkpoint import open_checkpoint
from mooncake.model.encoder import Encoder
from mooncake.model.tokenizer import load_tokenizer
from tests.examples import num_examples
from tests.tiny_tokenizer import tiny_backend

# The pre-tokenizers of published models.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Not those of the sample by which an encoder is judged, as far as they can be others.
PIECES = (
    *("q", "Ω", "ſ", "ﬃ", "ǆ", "ʹ", "語", "ァ", "𠀀", "글", "한", "ש", "ی", "क्ष", "ไทย"),
    *("A\u030a", "\u0327", "\u20dd"),
    *("0", "1234", "２", "๓", "¾", "Ⅻ", "③", "𝟗", "१", "1,000.5e-7"),
    *(" ", "  ", "     ", "\t\t", "\r", "\n", "\r\n\r\n", "\x0c", "\x1f"),
    *("\u2009", "\u202f", "\u2029", "\u205f"),
    *("\x00", "\x01", "\u200c", "\u2060", "\ue123", "\ufffe", "\u0378"),
    *("\U000e0041", "\U0010fffd", "\U00011f04"),
    *("I'm", "you'RE", "it’s", "'", "''ll", "__init__", "http://x.y/?z=1#a", "«»", "±", "∑", "₿"),
    *("`", "<", "|>"),
    *("🏳️\u200d🌈", "👍🏽", "☺\ufe0f", "1️⃣", "\u2581\u2581", "ĠĊ", "<0x41>", "word", "ab", "abc", "WORD"),
)


def byte_level(*, add_prefix_space: bool = False, use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, byte_level(use_regex=False)])


def with_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": byte_level,
    "gpt-2, space first": lambda: byte_level(add_prefix_space=True),
    "smollm": with_digits,
    "llama-3": lambda: splits(WORDS % r"\p{N}{1,3}"),
    "qwen-2": lambda: splits(WORDS % r"\p{N}"),
    "qwen-3.5": lambda: splits(QWEN_3_5),
    "gpt-4o": lambda: splits(GPT_4O),
    "deepseek": lambda: splits(*DEEPSEEK),
}


def merging_pairs(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Many pairs of bytes are tokens, so where a text is split shows in its ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in alphabet for second in alphabet]
    merges = random.Random(1).sample(pairs, k=20_000)
    tokens = [*alphabet, *map("".join, merges)]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizer
    return backend


def texts(num: int, *pieces: str, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    return ["".join(drawn.choices([*PIECES, *pieces], k=drawn.randrange(16))) for _ in range(num)]


def check_same(encoder: Encoder, backend: Tokenizer, given: list[str]) -> None:
    for text in given:
        for add_special_tokens in (False, True):
            expected = backend.encode(text, add_special_tokens=add_special_tokens).ids
            assert encoder.encode(text, add_special_tokens) == expected, repr(text)


@pytest.fixture(scope="module")
def default() -> tuple[Encoder, Tokenizer]:
    tokenizer = load_tokenizer(open_checkpoint(None))
    return tokenizer._encoder, tokenizer._backend


class TestSameIds:
    @pytest.mark.parametrize("name", PRE_TOKENIZERS)
    def test_of_published_pre_tokenizers(self, name: str) -> None:
        backend = merging_pairs(PRE_TOKENIZERS[name]())
        encoder = Encoder(backend)
        assert encoder.is_quick
        check_same(encoder, backend, texts(400))
        disputed = ["'\u017f", "'\u212a", "\u180e", " \U00011de0", "  \U00016ff6"]  # the libraries differ
        check_same(encoder, backend, texts(100, *disputed * 20))

    def test_of_the_default_model(self, default: tuple[Encoder, Tokenizer]) -> None:
        encoder, backend = default
        assert encoder.is_quick
        check_same(
            encoder, backend, texts(400, "<|im_start|>", "<|im_end|>", "<|im_", "user\n", "The", " the")
        )

    @settings(max_examples=num_examples(200))
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    def test_of_any_text(self, default: tuple[Encoder, Tokenizer], text: str) -> None:
        encoder, backend = default
        check_same(encoder, backend, [text])

    def test_with_normalizer_and_tokens_around(self) -> None:
        backend = tiny_backend()
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = splits(WORDS % r"\p{N}{1,3}")
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A <|im_end|>", pair=None, special_tokens=[("<|bos|>", 0), ("<|im_end|>", 2)]
        )
        encoder = Encoder(backend)
        assert encoder.is_quick
        check_same(encoder, backend, ["", *texts(400, "<|bos|>", "e\u0301", "A\u030a")])

    def test_of_added_tokens_of_all_kinds(self) -> None:
        backend = tiny_backend()
        backend.normalizer = normalizers.Lowercase()
        backend.add_tokens(
            [
                AddedToken("<l>", lstrip=True, normalized=False),
                AddedToken("<r>", rstrip=True, special=True, normalized=False),
                AddedToken("<lr>", lstrip=True, rstrip=True),
                AddedToken("word", single_word=True),
                AddedToken("LOUD", normalized=True),
                AddedToken("Exact", normalized=False),
                AddedToken("    ", normalized=False),
            ]
        )
        encoder = Encoder(backend)
        assert encoder.is_quick
        added = ("<l>", "<r>", "<lr>", "word", "words", " word ", "LOUD", "loud", "Exact", "exact", "   ")
        check_same(encoder, backend, texts(400, *added))

    @pytest.mark.parametrize("unit", ["a", " ", "\n", "1", "!", "é", "\u0301", "\u00a0", "a ", "'s"])
    def test_of_long_runs_in_bounded_time(self, default: tuple[Encoder, Tokenizer], unit: str) -> None:
        encoder, backend = default
        text = unit * 40_000
        expected = backend.encode_batch_fast([text])[0].ids
        started_s = time.process_time()
        assert encoder.encode(text, True) == expected
        assert time.process_time() - started_s < 2  # some 20 ms; 40,000 squared would take longer

    def test_from_several_threads_at_once(self, default: tuple[Encoder, Tokenizer]) -> None:
        encoder, backend = default
        long_texts = ["".join(texts(300, seed=seed)) for seed in range(8)]
        expected = [encoding.ids for encoding in backend.encode_batch_fast(long_texts)]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda text: encoder.encode(text, True), long_texts * 4))
        assert found == expected * 4


class TestWhereIdsWouldDiffer:
    @pytest.mark.parametrize(
        ("pre_tokenizer", "reason"),
        [
            (pre_tokenizers.Whitespace(), "unsupported pre-tokenizer"),
            (splits(r"\w+|\s+|[^\w\s]+"), "other ids"),  # what \w stands for
        ],
    )
    def test_other_pre_tokenizers_are_left_to_tokenizers(
        self, pre_tokenizer: pre_tokenizers.PreTokenizer, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = merging_pairs(pre_tokenizer)
        encoder = Encoder(backend)
        assert not encoder.is_quick
        assert reason in caplog.text
        check_same(encoder, backend, texts(50))

    def test_other_models_are_left_to_tokenizers(self, caplog: pytest.LogCaptureFixture) -> None:
        backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0))
        encoder = Encoder(backend)
        assert not encoder.is_quick
        assert "unsupported model" in caplog.text
        check_same(encoder, backend, ["ab", "", "aé"])

    def test_added_tokens_that_overlap_are_left_to_tokenizers(self, caplog: pytest.LogCaptureFixture) -> None:
        backend = tiny_backend()
        backend.add_tokens([AddedToken("abc", normalized=True), AddedToken("cd", normalized=False)])
        encoder = Encoder(backend)
        assert not encoder.is_quick
        assert "abcd" in caplog.text
        check_same(encoder, backend, ["abcd", "abcabcd"])

    def test_a_text_that_fastokens_gives_up_on_is_encoded_all_the_same(
        self, default: tuple[Encoder, Tokenizer]
    ) -> None:
        encoder, backend = default
        text = "one \x04 two"
        assert encoder._quick is not None
        with pytest.raises(ValueError, match="has no token"):
            encoder._quick.encode(text, True)
        assert encoder.encode(text, True) == backend.encode_batch_fast([text])[0].ids

    def test_a_text_in_which_fastokens_panics_is_encoded_all_the_same(
        self, default: tuple[Encoder, Tokenizer]
    ) -> None:
        class PanicException(BaseException):  # as Rust's
            pass

        class Panicking:
            def encode(self, text: str, add_special_tokens: bool) -> None:
                raise PanicException("index out of bounds")

        encoder = Encoder(default[1])
        encoder._quick = Panicking()
        assert encoder.encode("a b", True) == default[1].encode("a b").ids


def test_a_text_that_the_tokenizer_gives_up_on_is_refused() -> None:
    backend = tiny_backend()
    backend.pre_tokenizer = splits("(a+)+$")
    encoder = Encoder(backend)
    assert encoder.encode("ab", add_special_tokens=False)
    with pytest.raises(RequestError, match="the model's tokenizer cannot read this text: Onig"):
        encoder.encode("a" * 40 + "b", add_special_tokens=False)
