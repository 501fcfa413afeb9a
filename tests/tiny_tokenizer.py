"""A small byte-level BPE tokenizer with a ChatML template, for tests: vocabulary 512, always the same."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
BOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2
SPECIAL_TOKENS = ["<|bos|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the system answers the user. "
    "A server that keeps its cache serves the same prefix again without computing it; what was read once is "
    "reused, moved between machines, and only then evicted. "
    "user assistant system answer question prompt token block layer prefill decode transfer schedule reject "
    "Once upon a time there was a machine that could remember what it had been told; it never forgot a word. "
    "What is the capital of France? Paris is the capital of France. Tell me about the moon and a cake. "
    "2024 3.14 1,000 héllo wörld naïve café 日本語 こんにちは 🎉🚀 "
)


def tiny_backend() -> Tokenizer:
    """Return the bare tokenizer, without a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([_CORPUS] * 4, trainer)
    return backend


def write_tiny_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Save the tokenizer into `directory` in Hugging Face's form, beside the files that are there."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tiny_backend(),
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[IM_END_ID],
        chat_template=chat_template,
    ).save_pretrained(directory)
