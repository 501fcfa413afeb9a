"""A model whose sequences have their first pages at a helper, against the same model with all pages in one
place."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch

from kernels.cpu.mailbox import HelperLost
from kernels.cpu.moved_attention import AttentionHelper, AttentionOwner, MailboxShape
from tests.deadline import DEADLINE_S
from tests.tiny_models import VOCAB_SIZE, tiny_model
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.helped_parts import HostedPages
from workers.engine.model import DecoderModel
from workers.execution.model_spec import model_spec

PAGE_SIZE, NUM_HOSTED = 8, 18
NUM_NEW = 20
PROMPT_LENS = (90, 33, 5)
HALF = Fraction(1, 2)
FAMILIES = [("llama3", 1), ("llama3", 2), ("qwen2_window", 2)]
"""Models and numbers of KV heads: with a single one there is nothing else to divide."""


def load(family: str, num_kv_heads: int) -> DecoderModel:
    reference = tiny_model(
        family, hidden_size=128, num_attention_heads=4, num_key_value_heads=num_kv_heads, head_dim=64
    )
    spec = model_spec(reference.config.to_dict())
    model = DecoderModel(spec, range(spec.num_layers), torch.float32)
    model.load_weights(reference.state_dict().items())
    assert not model.why_not_helped
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (num,), generator=generator).tolist() for num in PROMPT_LENS]


class Whole:
    """All pages in one place."""

    def __init__(self, model: DecoderModel, num_pages: int = 40) -> None:
        self.model = model
        self.kv = DeviceKVCache(model.spec, model.layers, num_pages, PAGE_SIZE, torch.float32)

    def decode(
        self, sequences: list[list[int]], tables: list[list[int]], num_cached: list[int]
    ) -> list[torch.Tensor]:
        """Append greedy tokens; the pages are there. Returns the logits of each step."""
        steps = []
        for _ in range(NUM_NEW):
            each = zip(sequences, num_cached, tables, strict=True)
            chunks = [Chunk(tokens[num:], num, pages) for tokens, num, pages in each]
            logits = self.model.forward(Batch.build(chunks, self.kv), self.kv)
            steps.append(logits.clone())
            for index, token in enumerate(logits.argmax(-1).tolist()):
                num_cached[index] = len(sequences[index])
                sequences[index].append(token)
        return steps


class Divided(Whole):
    """Pages here, and more at a helper, which is a thread."""

    def __init__(self, model: DecoderModel, num_own: int, timeout_s: float = DEADLINE_S) -> None:
        super().__init__(model, num_own)
        shape = MailboxShape(200, 4, NUM_HOSTED, model.heads, torch.float32, has_keys=True)
        memory = torch.zeros(shape.size_bytes, dtype=torch.uint8)
        layers = self.kv.new_layers(NUM_HOSTED, model.heads.num_kv_heads)
        windows = [model.spec.layer_sliding_window(layer) for layer in model.layers]
        self.helper = AttentionHelper(model.library, memory, shape, layers, windows)
        owner = AttentionOwner(model.library, memory, shape, timeout_s)
        own = [self.kv.layer(layer) for layer in self.kv.layers]
        self.kv.rearrange(own, HostedPages(HALF, layers, owner, None))

    @contextmanager
    def hosting(self) -> Iterator[None]:
        def host() -> None:
            while (described := self.helper.await_pass()) is not None:
                self.helper.host(described)

        thread = threading.Thread(target=host)
        thread.start()
        try:
            yield
        finally:
            self.helper.close()
            thread.join(DEADLINE_S)


def whole_tables(whole: Whole, texts: list[list[int]]) -> list[list[int]]:
    """Compute the prompts, and return their page tables, which have room for the output."""
    tables = [whole.kv.pages.allocate(-(-(len(text) + NUM_NEW) // PAGE_SIZE)) for text in texts]
    chunks = [Chunk(text, 0, pages) for text, pages in zip(texts, tables, strict=True)]
    whole.model.forward(Batch.build(chunks, whole.kv), whole.kv)
    return tables


def divided_tables(
    divided: Divided, whole: Whole, tables: list[list[int]], lens: list[int]
) -> list[list[int]]:
    """Return other page tables, with some full pages at the helper, to which the pages of `tables` have been
    copied."""
    divided_tables = []
    for pages, num_tokens in zip(tables, lens, strict=True):
        there = divided.kv.pages.allocate(len(pages), num_tokens // PAGE_SIZE)
        divided_tables.append(there)
        source, target = torch.tensor(pages), torch.tensor(there)
        for layer in divided.kv.layers:
            divided.kv.scatter(layer, target, whole.kv.gather(layer, source))
            assert torch.equal(divided.kv.gather(layer, target), whole.kv.gather(layer, source))
    return divided_tables


@pytest.mark.parametrize(
    ("num_own", "nums_hosted"), [(14, [7, 4, 0]), (4, [11])], ids=["several", "one that does not fit here"]
)
@pytest.mark.parametrize(("family", "num_kv_heads"), FAMILIES)
def test_tokens_are_those_of_all_pages_in_one_place(
    family: str, num_kv_heads: int, num_own: int, nums_hosted: list[int]
) -> None:
    model, texts = load(family, num_kv_heads), prompts()[: len(nums_hosted)]
    whole, divided, lens = Whole(model), Divided(model, num_own), [len(text) for text in texts]
    tables = whole_tables(whole, texts)
    there = divided_tables(divided, whole, tables, lens)
    assert [divided.kv.pages.num_hosted_of(pages) for pages in there] == nums_hosted
    expected_texts, texts = ([[*text, 7] for text in texts] for _ in range(2))
    expected = whole.decode(expected_texts, tables, list(lens))
    with divided.hosting():
        logits = divided.decode(texts, there, list(lens))
    assert texts == expected_texts
    for step, expected_step in zip(logits, expected, strict=True):
        torch.testing.assert_close(step, expected_step, rtol=0, atol=1e-4)


def test_chunks_of_several_tokens_see_the_pages_at_the_helper() -> None:
    model, (text, *_) = load("qwen2_window", 2), prompts()
    whole, divided = Whole(model), Divided(model, 14)
    [pages] = whole_tables(whole, [text])
    [there] = divided_tables(divided, whole, [pages], [40])
    assert divided.kv.pages.num_hosted_of(there) == 5
    chunk = text[40:]
    expected = model.forward(Batch.build([Chunk(chunk, 40, pages)], whole.kv), whole.kv)
    with divided.hosting():
        logits = model.forward(Batch.build([Chunk(chunk, 40, there)], divided.kv), divided.kv)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_lost_helper_is_missed_by_passes_with_its_pages_alone() -> None:
    divided = Divided(load("llama3", 2), 14, timeout_s=0.05)
    own, there = divided.kv.pages.allocate(2), divided.kv.pages.allocate(4, 3)
    divided.model.forward(Batch.build([Chunk([3], 0, own)], divided.kv), divided.kv)
    batch = Batch.build([Chunk([3], 24, there)], divided.kv)
    for _ in range(2):
        with pytest.raises(HelperLost):
            divided.model.forward(batch, divided.kv)
    divided.model.forward(Batch.build([Chunk([3], 0, own)], divided.kv), divided.kv)


def test_pages_at_the_helper_are_full_and_come_first() -> None:
    divided = Divided(load("llama3", 2), 14)
    hosted = divided.kv.pages.allocate(4, 3)[:2]
    own = divided.kv.pages.allocate(3)
    for pages, start in (([*own[:1], *hosted], 20), (hosted, 10), ([*hosted, *own], 15)):
        with pytest.raises(ValueError, match="leading full pages alone"):
            Batch.build([Chunk([3], start, pages)], divided.kv)
