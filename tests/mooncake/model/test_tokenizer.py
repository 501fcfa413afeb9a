import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from mooncake.errors import ModelError, RequestError
from mooncake.model.byte_level import ByteLevelDetokenizer
from mooncake.model.checkpoint import open_checkpoint
from mooncake.model.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from tests.examples import num_examples
from tests.tiny_config import CONFIG
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_tokenizer import IM_END_ID, IM_START_ID, VOCAB_SIZE, tiny_backend, write_tiny_tokenizer


def load_directory(directory: Path, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
    return load_tokenizer(open_checkpoint(str(directory), "dummy"))


def load_gguf(path: Path, **metadata: Any) -> Tokenizer:
    """The tiny tokenizer's vocabulary in a GGUF file; `metadata` as in write_tiny_gguf, less `tokenizer.`."""
    model = json.loads(tiny_backend().to_str())["model"]
    fields: dict[str, Any] = {
        "ggml__model": "gpt2",
        "ggml__pre": "gpt-2",
        "ggml__tokens": sorted(model["vocab"], key=model["vocab"].__getitem__),
        "ggml__token_type": [3] * 3 + [1] * (VOCAB_SIZE - 3),
        "ggml__merges": [" ".join(merge) for merge in model["merges"]],
        "ggml__bos_token_id": 0,
        "ggml__eos_token_id": IM_END_ID,
        **metadata,
    }
    fields = {f"tokenizer__{key}": value for key, value in fields.items()}
    return load_tokenizer(open_checkpoint(str(write_tiny_gguf(path, **fields))))


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    return load_tokenizer(open_checkpoint(None))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(directory)
    return load_directory(directory)


class TestDefaultModel:
    def test_digits_are_tokens_of_their_own_beside_any_white_space(self, default: Tokenizer) -> None:
        def pieces(text: str) -> list[str]:
            return [default.decode([token_id]) for token_id in default.encode(text)]

        assert pieces("Hello  123 45\n\n 6") == ["Hello", "  ", "1", "2", "3", " ", "4", "5", "\n\n ", "6"]
        assert pieces("a 1\t2") == ["a", " ", "1", "\t", "2"]
        assert pieces("in 2024") == ["in", " ", "2", "0", "2", "4"]

    @pytest.mark.parametrize(
        "text", ["", "Hello world", "  12\t\n 3.5e-7 ", "naïve 日本語 🎉👩‍👩‍👧 \x00\x7f", "a" * 5000]
    )
    def test_text_survives_the_round_trip(self, default: Tokenizer, text: str) -> None:
        assert default.decode(default.encode(text)) == text

    def test_special_tokens_are_the_files(self, default: Tokenizer) -> None:
        assert (default.eos_token_ids, default.vocab_size) == ((2,), 49152)
        assert default.special_token_ids == set(range(17))
        assert default.encode("a<|im_end|>b") == [*default.encode("a"), 2, *default.encode("b")]

    def test_chat_template_frames_the_conversation(self, default: Tokenizer) -> None:
        ids = default.render_chat(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
        )
        expected = (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert default.decode(ids, skip_special_tokens=False) == expected
        assert ids.count(1) == 3
        assert ids.count(2) == 2
        without_prompt = default.render_chat([{"role": "user", "content": "x"}], add_generation_prompt=False)
        assert without_prompt[-2:] == [2, *default.encode("\n")]


class TestChat:
    def test_template_refusal_is_passed_on(self, tiny: Tokenizer) -> None:
        with pytest.raises(RequestError, match="unknown role tool") as caught:
            tiny.render_chat([{"role": "tool", "content": "x"}])
        assert (caught.value.param, caught.value.status) == ("messages", 400)

    @pytest.mark.parametrize("messages", [[{}], [{"role": None}], [{"content": "x"}]])
    def test_messages_that_break_the_template_are_the_clients_mistake(
        self, tiny: Tokenizer, messages: Any
    ) -> None:
        with pytest.raises(RequestError) as caught:
            tiny.render_chat(messages)
        assert caught.value.param == "messages"

    def test_model_without_template_says_so(self, tmp_path: Path) -> None:
        write_tiny_tokenizer(tmp_path, chat_template=None)
        tokenizer = load_directory(tmp_path)
        assert not tokenizer.has_chat_template
        with pytest.raises(RequestError, match="no chat template") as caught:
            tokenizer.render_chat([{"role": "user", "content": "x"}])
        assert caught.value.param == "messages"

    def test_request_cannot_replace_the_template(self, tiny: Tokenizer) -> None:
        with pytest.raises(RequestError, match="chat_template"):
            tiny.render_chat([{"role": "user", "content": "x"}], chat_template="{{ 1 }}")

    def test_tokens_are_those_of_the_rendered_text(self, tiny: Tokenizer) -> None:
        ids = tiny.render_chat([{"role": "user", "content": "the cache <|im_end|>"}])
        assert ids == tiny.encode("<|im_start|>user\nthe cache <|im_end|><|im_end|>\n<|im_start|>assistant\n")
        assert (ids[0], ids.count(IM_START_ID), ids.count(IM_END_ID)) == (IM_START_ID, 2, 2)


class TestDirectory:
    def test_tiny_tokenizer_is_always_the_same(self, tiny: Tokenizer) -> None:
        assert tiny.vocab_size == VOCAB_SIZE
        assert tiny_backend().to_str() == tiny_backend().to_str()
        assert tiny.eos_token_ids == (IM_END_ID,)

    def test_tokens_beyond_the_models_vocabulary_are_refused_unless_they_were_added(
        self, tmp_path: Path
    ) -> None:
        write_tiny_tokenizer(tmp_path)
        loaded = load_directory(tmp_path)
        file = tmp_path / "tokenizer.json"
        fields = json.loads(file.read_text())
        fields["added_tokens"].append({**fields["added_tokens"][0], "id": VOCAB_SIZE, "content": "<|pad|>"})
        file.write_text(json.dumps(fields))
        assert load_directory(tmp_path).vocab_size == loaded.vocab_size + 1
        fields["model"]["vocab"]["beyond"] = VOCAB_SIZE + 1
        file.write_text(json.dumps(fields))
        with pytest.raises(ModelError, match="tokens up to id 513, but vocab_size is 512"):
            load_directory(tmp_path)

    def test_vocab_size_covers_ids_behind_a_hole(self, tmp_path: Path) -> None:
        write_tiny_tokenizer(tmp_path)
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        last = max(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
        content["model"]["vocab"][last] = 600
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert load_directory(tmp_path, vocab_size=601).vocab_size == 601

    def test_truncation_saved_with_the_tokenizer_is_ignored(self, tmp_path: Path) -> None:
        write_tiny_tokenizer(tmp_path)
        backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
        backend.enable_truncation(4)
        backend.enable_padding(length=10)
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_directory(tmp_path)
        assert (
            tokenizer.decode(tokenizer.encode("the server answers the user")) == "the server answers the user"
        )

    def test_lone_surrogate_is_the_clients_mistake(self, tiny: Tokenizer) -> None:
        with pytest.raises(RequestError, match="at character 1"):
            tiny.encode("a\ud800b")

    @pytest.mark.parametrize("content", [None, b"", b"{", b'{"model": {}}'])
    def test_missing_or_damaged_tokenizer(self, tmp_path: Path, content: bytes | None) -> None:
        if content is not None:
            (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
            load_directory(tmp_path)


class TestGGUF:
    def test_same_vocabulary_gives_the_same_ids_as_the_directory(
        self, tmp_path: Path, tiny: Tokenizer
    ) -> None:
        tokenizer = load_gguf(tmp_path / "m.gguf")
        for text in ("the cache 2024  x\n\n", "<|im_start|>user\n🎉<|im_end|>", " naïve"):
            assert tokenizer.encode(text) == tiny.encode(text)
        assert tokenizer.special_token_ids == tiny.special_token_ids

    @pytest.mark.parametrize(
        ("pre", "split"),
        [
            ("gpt-2", ["x", " 12345", "'", "LL", " a"]),
            ("smollm", ["x", " ", "1", "2", "3", "4", "5", "'", "LL", " a"]),
            ("llama-bpe", ["x", " ", "123", "45", "'LL", " a"]),
            ("qwen2", ["x", " ", "1", "2", "3", "4", "5", "'LL", " a"]),
        ],
    )
    def test_pre_tokenizer_decides_what_may_merge(self, tmp_path: Path, pre: str, split: list[str]) -> None:
        tokenizer = load_gguf(tmp_path / "m.gguf", ggml__pre=pre)
        backend = tokenizer._backend  # what is asked here cannot be seen from outside with a tiny vocabulary
        pieces = [
            piece.replace("Ġ", " ") for piece, _ in backend.pre_tokenizer.pre_tokenize_str("x 12345'LL a")
        ]
        assert pieces == split

    def test_bos_is_added_where_the_file_or_its_family_says_so(self, tmp_path: Path) -> None:
        for name, metadata, added in (
            ("default", {}, False),
            ("asked", {"ggml__add_bos_token": True}, True),
            ("family", {"ggml__pre": "llama-bpe"}, True),
            ("refused", {"ggml__pre": "llama-bpe", "ggml__add_bos_token": False}, False),
        ):
            tokenizer = load_gguf(tmp_path / f"{name}.gguf", **metadata)
            assert (tokenizer.encode("x")[0] == 0) == added, name
            assert tokenizer.encode("x", add_special_tokens=False)[0] != 0, name

    @pytest.mark.parametrize(
        ("metadata", "complaint"),
        [
            ({"ggml__model": "llama"}, "tokenizer model 'llama' is not supported"),
            ({"ggml__pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not supported"),
            ({"ggml__merges": ["a b c"]}, "damaged"),
            ({"ggml__merges": ["never seen"]}, "damaged"),
            ({"ggml__merges": None}, "damaged"),
            ({"ggml__token_type": [1]}, "damaged"),
            ({"ggml__add_bos_token": True, "ggml__bos_token_id": 9999}, "damaged"),
        ],
    )
    def test_what_cannot_be_rebuilt_is_refused(self, tmp_path: Path, metadata: Any, complaint: str) -> None:
        with pytest.raises(ModelError, match=complaint):
            load_gguf(tmp_path / "m.gguf", **metadata)


class RecordingTokenizer(Tokenizer):
    """Remembers how many tokens were decoded at most at once."""

    max_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.max_decoded = max(self.max_decoded, len(ids))
        return super().decode(ids, skip_special_tokens)


# Single bytes (ids 3 to 258 of the tiny vocabulary) are favoured: they break characters in every way.
TOKEN_IDS = st.lists(st.one_of(st.integers(0, VOCAB_SIZE + 5), st.integers(3, 258)), max_size=80)


class TestIncrementalDetokenizer:
    @given(ids=TOKEN_IDS, sizes=st.lists(st.integers(1, 5)), skip=st.booleans())
    @settings(max_examples=num_examples(300))
    def test_pieces_add_up_to_the_whole(
        self, tiny: Tokenizer, ids: list[int], sizes: list[int], skip: bool
    ) -> None:
        for detokenizer in (IncrementalDetokenizer(tiny, skip), tiny.detokenizer(skip)):
            pieces, rest = [], ids
            for size in sizes:
                pieces.append(detokenizer.push(rest[:size]))
                rest = rest[size:]
            pieces += [detokenizer.push([token_id]) for token_id in rest]
            assert "".join(pieces) + detokenizer.flush() == tiny.decode(ids, skip_special_tokens=skip)

    @given(text=st.text(st.sampled_from("ab 1é日🎉👩‍👧\n"), max_size=60))
    @settings(max_examples=num_examples(100))
    def test_characters_in_flight_are_held_back(self, tiny: Tokenizer, text: str) -> None:
        ids = tiny.encode(text)
        for detokenizer in (IncrementalDetokenizer(tiny), tiny.detokenizer()):
            emitted = ""
            for num_pushed, token_id in enumerate(ids, 1):
                emitted += detokenizer.push([token_id])
                assert emitted == tiny.decode(ids[:num_pushed]).rstrip("\N{REPLACEMENT CHARACTER}")
            assert emitted == text
            assert detokenizer.flush() == ""

    def test_a_byte_level_stream_needs_no_window(self, tiny: Tokenizer) -> None:
        assert isinstance(tiny.detokenizer(), ByteLevelDetokenizer)
        hidden, shown = tiny.detokenizer(), tiny.detokenizer(skip_special_tokens=False)
        ids = [IM_START_ID, *tiny.encode("é"), VOCAB_SIZE + 5]
        assert (hidden.push(ids), shown.push(ids)) == ("é", "<|im_start|>é")

    @pytest.mark.parametrize("kind", ["text", "broken bytes", "special tokens", "characters never finished"])
    def test_cost_of_a_token_does_not_grow_with_the_stream(self, tiny: Tokenizer, kind: str) -> None:
        recording = RecordingTokenizer(tiny._wrapped, tiny.eos_token_ids)
        vocab = tiny._backend.get_vocab()
        stream = {
            "text": tiny.encode("the server answers 🎉 the user 日本語 ") * 20,
            "broken bytes": [vocab["Ģ"]] * 400,  # 0x80, a continuation byte
            "special tokens": [IM_START_ID] * 400,
            "characters never finished": [vocab["ð"], vocab["Ł"]] * 200,  # 0xF0 0x9F, half an emoji
        }[kind]
        detokenizer = IncrementalDetokenizer(recording)
        text = "".join(detokenizer.push([token_id]) for token_id in stream) + detokenizer.flush()
        assert recording.max_decoded <= 40
        assert text == tiny.decode(stream)

    def test_leading_spaces_and_byte_fallback_of_sentencepiece_models(self) -> None:
        """Their decoder strips the first space of what it is given, and joins bytes only if all are there."""
        words = ["<unk>", "▁", "▁hello", "▁world", "lo", *(f"<0x{byte:02X}>" for byte in range(256))]
        backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), ())
        emoji = [5 + byte for byte in "🎉".encode()]
        ids = [2, 3, *emoji, *emoji, 3, 4, 1, 2, *emoji, 3] * 8
        detokenizer = tokenizer.detokenizer()
        assert isinstance(detokenizer, IncrementalDetokenizer)
        pieces = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)
        assert pieces[:6] == ["hello", " world", "", "", "", "🎉"]
