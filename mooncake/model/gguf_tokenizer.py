"""The tokenizer inside a GGUF file, rebuilt for Hugging Face's `tokenizers`.

Owns: byte-level BPE (`tokenizer.ggml.model` = "gpt2") from vocabulary, merges and token types, and the table
of pre-tokenizers. Does not know: chat templates, requests (`tokenizer`).

The conversion inside transformers ignores `tokenizer.ggml.pre` and splits numbers wrongly for most models.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from mooncake.errors import ModelError, first_line, shown
from mooncake.model.gguf_file import GGUFHeader

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that never come out of a merge


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """The way in which a `tokenizer.ggml.pre` splits a text."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    normalize_nfc: bool = False
    adds_bos: bool = False


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _by_words_and_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# The regexes of published tokenizer.json files; Llama 3 and Qwen 2 differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": _PreTokenizer(_by_words_and_digits),
    "llama-bpe": _PreTokenizer(lambda: _by_regex(_WORDS % r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True),
    "qwen2": _PreTokenizer(lambda: _by_regex(_WORDS % r"\p{N}"), normalize_nfc=True),
}


def pre_tokenizer_of(header: GGUFHeader) -> _PreTokenizer:
    """Return how the file's tokenizer splits a text.

    Raises ModelError for kinds that cannot be rebuilt exactly.
    """
    path, metadata = header.path, header.metadata
    model, pre_name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ModelError(
            f"{path}: tokenizer model {shown(model)} is not supported in GGUF, only 'gpt2' (byte-level BPE)"
            " is; use the model's Hugging Face directory"
        )
    pre = _PRE_TOKENIZERS.get(pre_name) if isinstance(pre_name, str) else None
    if pre is None:
        raise ModelError(
            f"{path}: pre-tokenizer {shown(pre_name)} is not supported, only"
            f" {', '.join(_PRE_TOKENIZERS)} are; use the model's Hugging Face directory"
        )
    return pre


def build_tokenizer(header: GGUFHeader) -> Tokenizer:
    """Return the file's tokenizer, rebuilt. Raises ModelError for kinds that cannot be rebuilt exactly."""
    path, metadata, pre = header.path, header.metadata, pre_tokenizer_of(header)
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [_split_merge(merge) for merge in metadata["tokenizer.ggml.merges"]]
        token_types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        if len(vocab) != len(tokens) or len(token_types) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {len(vocab)} distinct, {len(token_types)} token types")
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
        if pre.normalize_nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre.build()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(
            [
                AddedToken(token, special=token_type == _CONTROL, normalized=False)
                for token, token_type in zip(tokens, token_types, strict=True)
                if token_type in (_CONTROL, _USER_DEFINED)
            ]
        )
        tokenizer.post_processor = _post_processor(header, tokens, pre.adds_bos)
    except Exception as error:  # noqa: BLE001 - `tokenizers` raises bare Exception for what it refuses
        raise ModelError(f"{path}: its tokenizer is damaged: {first_line(error)}") from None
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _post_processor(header: GGUFHeader, tokens: list[str], adds_bos: bool) -> processors.PostProcessor:
    """Return the post-processor that adds the file's special tokens around a text.

    Offsets stay those of the text.
    """
    byte_level = processors.ByteLevel(trim_offsets=False)
    around: dict[str, int] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        if header.metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            around[name] = header.metadata[f"tokenizer.ggml.{name}_token_id"]
    if not around:
        return byte_level
    single = [f"{tokens[around['bos']]}:0"] if "bos" in around else []
    single.append("$A:0")
    if "eos" in around:
        single.append(f"{tokens[around['eos']]}:0")
    special_tokens = [(tokens[token_id], token_id) for token_id in around.values()]
    return processors.Sequence(
        [byte_level, processors.TemplateProcessing(single=single, pair=None, special_tokens=special_tokens)]
    )
