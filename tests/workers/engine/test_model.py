"""The decoder model against transformers: the same greedy tokens, however the work is cut and batched.

Both compute on the GPU if there is one.
"""

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch

from tests.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.triton_device import DEVICE
from tests.workers.references import greedy_in_batch
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec
from workers.engine.weights import WeightsError
from workers.execution.model_spec import model_spec

PROMPT_LENS = (37, 1, 20, 64, 9)
NUM_NEW = 16


@lru_cache
def load(family: str) -> tuple[DecoderModel, dict[str, torch.Tensor], ModelSpec]:
    reference = tiny_model(family)
    spec = model_spec(reference.config.to_dict())
    model = DecoderModel(spec, range(spec.num_layers), torch.float32, DEVICE)
    weights = dict(reference.state_dict())
    model.load_weights(weights.items())
    return model, weights, spec


@lru_cache
def greedy_by_transformers(family: str) -> list[list[int]]:
    """Prompts of PROMPT_LENS, each with its NUM_NEW greedy tokens."""
    reference = tiny_model(family).to(DEVICE)
    texts = []
    for seed, length in enumerate(PROMPT_LENS):
        prompt = torch.randint(VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))
        prompt = prompt.to(DEVICE)
        # Without a mask, generate takes a prompt's token 0 for padding.
        everything = torch.ones_like(prompt)
        output = reference.generate(
            prompt, attention_mask=everything, max_new_tokens=NUM_NEW, do_sample=False
        )
        texts.append(output[0].tolist())
    return texts


def interleaved_tables(kv: DeviceKVCache, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Page tables in which no sequence's pages are adjacent or ascending."""
    tables: list[list[int]] = [[] for _ in texts]
    for first in range(0, max(map(len, texts)), kv.page_size):
        for text, table in zip(texts, tables, strict=True):
            if first < len(text):
                table[:0] = kv.pages.allocate(1)
    return tables


def greedy(model: DecoderModel, texts: list[list[int]], page_size: int, chunk_size: int) -> list[list[int]]:
    """The prompts of all texts, with the tokens that the model draws behind them."""
    kv = DeviceKVCache(model.spec, model.layers, 80, page_size, torch.float32, DEVICE)
    prompts = [text[:length] for text, length in zip(texts, PROMPT_LENS, strict=True)]
    return greedy_in_batch(model, kv, interleaved_tables(kv, texts), prompts, NUM_NEW, chunk_size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("page_size", "chunk_size"), [(8, 512), (16, 512), (8, 5), (16, 17), (8, 1)])
def test_greedy_tokens_equal_transformers(family: str, page_size: int, chunk_size: int) -> None:
    texts = greedy_by_transformers(family)
    assert greedy(load(family)[0], texts, page_size, chunk_size) == texts


def test_the_reference_tokens_depend_on_the_context() -> None:
    # Else every test above would pass with attention left out.
    for text, length in zip(greedy_by_transformers("llama3"), PROMPT_LENS, strict=True):
        assert len(set(text[length:])) > NUM_NEW // 2


def test_heads_that_are_not_rotated_may_have_an_odd_size() -> None:
    reference = tiny_model("opt", hidden_size=60, word_embed_proj_dim=60).to(DEVICE)
    spec = model_spec(reference.config.to_dict())
    assert spec.head_dim == 15
    model = DecoderModel(spec, range(spec.num_layers), torch.float32, DEVICE)
    model.load_weights(reference.state_dict().items())
    kv = DeviceKVCache(spec, model.layers, 4, 8, torch.float32, DEVICE)
    prompt = list(range(20))
    logits = model.forward(Batch.build([Chunk(prompt, 0, kv.pages.allocate(3))], kv), kv)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt], device=DEVICE)).logits[0, -1:]
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("family", ["llama3", "qwen2_window", "smollm2", "opt"])
@pytest.mark.parametrize("split", [1, 3])
def test_two_stages_give_the_same_hidden_states_and_logits(family: str, split: int) -> None:
    whole, weights, spec = load(family)
    first = DecoderModel(spec, range(split), torch.float32, DEVICE)
    second = DecoderModel(spec, range(split, spec.num_layers), torch.float32, DEVICE)
    for stage in (first, second):
        stage.load_weights(weights.items())
    text = greedy_by_transformers(family)[0]

    def caches(model: DecoderModel) -> tuple[DeviceKVCache, list[int]]:
        kv = DeviceKVCache(spec, model.layers, 16, 8, torch.float32, DEVICE)
        return kv, kv.pages.allocate(8)

    (whole_kv, whole_pages), (kv_a, pages_a), (kv_b, pages_b) = map(caches, (whole, first, second))
    for start, end in ((0, 20), (20, 37), (37, 38)):
        batch = Batch.build([Chunk(text[start:end], start, whole_pages)], whole_kv)
        expected = whole.embed(batch)
        for layer in whole.layers:
            expected = whole.forward_layer(layer, expected, batch, whole_kv)

        batch = Batch.build([Chunk(text[start:end], start, pages_a)], kv_a)
        hidden = first.embed(batch)
        for layer in first.layers:
            hidden = first.forward_layer(layer, hidden, batch, kv_a)
        batch = Batch.build([Chunk(text[start:end], start, pages_b[::-1])], kv_b)
        for layer in second.layers:
            hidden = second.forward_layer(layer, hidden, batch, kv_b)
        assert torch.equal(hidden, expected)
        assert torch.equal(second.logits(hidden), whole.logits(expected))


def test_a_stage_gets_the_dummy_weights_that_the_whole_model_gets() -> None:
    spec = load("qwen2")[2]
    kv = DeviceKVCache(spec, range(4), 4, 8, torch.bfloat16, DEVICE)
    batch = Batch.build([Chunk([1, 2, 3], 0, [2])], kv)
    outputs = []
    for layers in (range(4), range(2, 4)):
        model = DecoderModel(spec, layers, torch.bfloat16, DEVICE)
        model.init_dummy_weights(seed=7)
        hidden = torch.ones(3, spec.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        outputs.append(model.logits(model.forward_layer(3, hidden, batch, kv)))
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


def test_bfloat16_logits_are_close_to_transformers() -> None:
    reference = tiny_model("llama3").to(DEVICE, torch.bfloat16)
    _, weights, spec = load("llama3")
    model = DecoderModel(spec, range(spec.num_layers), torch.bfloat16, DEVICE)
    model.load_weights(weights.items())
    prompt = greedy_by_transformers("llama3")[3]
    kv = DeviceKVCache(spec, model.layers, 16, 8, torch.bfloat16, DEVICE)
    logits = model.forward(Batch.build([Chunk(prompt, 0, kv.pages.allocate(10))], kv), kv)[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt], device=DEVICE)).logits[0, -1].float()
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


class TestLoadWeights:
    def load_changed(self, **changes: torch.Tensor | None) -> None:
        _, weights, spec = load("llama3")
        changed = {**weights, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
        model = DecoderModel(spec, range(2), torch.float32, DEVICE)
        model.load_weights((name, tensor) for name, tensor in changed.items() if tensor is not None)

    def test_names_a_tensor_of_the_wrong_shape_and_both_shapes(self) -> None:
        with pytest.raises(
            WeightsError, match=r"layers.1.self_attn.k_proj.weight: expected shape \[32, 64\], got \[64, 64\]"
        ):
            self.load_changed(model__layers__1__self_attn__k_proj__weight=torch.zeros(64, 64))

    def test_names_a_missing_tensor(self) -> None:
        with pytest.raises(
            WeightsError, match=r"1 of 19 tensors are missing.*layers.0.mlp.up_proj.weight \[96, 64\]"
        ):
            self.load_changed(model__layers__0__mlp__up_proj__weight=None)

    def test_refuses_a_tensor_that_the_configuration_does_not_have(self) -> None:
        with pytest.raises(WeightsError, match=r"layers.0.self_attn.q_proj.bias: .* has no such tensor"):
            self.load_changed(model__layers__0__self_attn__q_proj__bias=torch.zeros(64))

    @pytest.mark.parametrize("name", ["model__norm__bias", "model__embed_positions__weight"])
    def test_refuses_tensors_of_other_architectures(self, name: str) -> None:
        with pytest.raises(WeightsError, match="has no such tensor"):
            self.load_changed(**{name: torch.zeros(64)})

    def test_skips_other_stages_and_computed_frequencies(self) -> None:
        self.load_changed(
            model__layers__3__mlp__up_proj__weight=None,
            lm_head__weight=None,
            model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8),
        )


def test_a_checkpoint_of_opt_without_its_head_has_other_names() -> None:
    model, weights, spec = load("opt")
    other = DecoderModel(spec, range(spec.num_layers), torch.float32, DEVICE)
    other.load_weights((name.removeprefix("model."), tensor) for name, tensor in weights.items())
    texts = greedy_by_transformers("opt")
    assert greedy(other, texts, 8, 17) == texts
    fc1 = "model.decoder.layers.0.fc1.weight"
    with pytest.raises(WeightsError, match=rf"1 of \d+ tensors are missing.*{fc1} \[96, 64\]"):
        other.load_weights((name, tensor) for name, tensor in weights.items() if name != fc1)
    assert model.fallback_reason


def test_a_batch_refuses_chunks_that_cannot_be_run() -> None:
    kv = DeviceKVCache(load("llama3")[2], range(4), 80, 8, torch.float32, DEVICE)
    with pytest.raises(ValueError, match="at least one chunk"):
        Batch.build([], kv)
    with pytest.raises(ValueError, match="at least one token"):
        Batch.build([Chunk([], 0, [1])], kv)
    with pytest.raises(ValueError, match="ends at token 17 needs 3 pages of 8 tokens, got 2"):
        Batch.build([Chunk([1, 2], 15, [0, 1])], kv)
    with pytest.raises(ValueError, match="ends at token 513, the model has 512"):
        Batch.build([Chunk([1], 512, list(range(70)))], kv)
