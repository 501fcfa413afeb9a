"""The model on the CPU's own kernels: equal to transformers; no bit depends on cuts and batches."""

import logging
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers

from kernels.cpu.library import ENV, Isa
from tests.kernels.cpu.isas import SUPPORTED, on_every_isa
from tests.tiny_models import random_model
from tests.workers.references import greedy_in_batch
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec
from workers.engine.weights import WeightsError
from workers.execution.model_spec import model_spec

PROMPT_LENS = (150, 37, 1, 65)
NUM_NEW = 8
ROWS_OF_BLOCK = 128  # of linear.h

# family -> (config class, what is special); every variant of a layer, and every head_dim
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 64, "tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", {"head_dim": 96, "attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("MistralConfig", {"head_dim": 128, "sliding_window": 20}),
    "qwen2_window": (
        "Qwen2Config",
        {
            "hidden_size": 192,  # 3 heads of 64
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 30,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 64, "num_key_value_heads": 3}),
}


@lru_cache
def reference(family: str) -> transformers.PreTrainedModel:
    class_name, differences = FAMILIES[family]
    sizes = {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        # Larger than a trained model's, so that the next token depends visibly on the context.
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return random_model(class_name, {**sizes, **differences})


def load(family: str, dtype: torch.dtype = torch.float32, **options: bool) -> DecoderModel:
    spec = model_spec(reference(family).config.to_dict())
    model = DecoderModel(spec, range(spec.num_layers), dtype, **options)
    model.load_weights(reference(family).state_dict().items())
    return model


@lru_cache
def greedy_by_transformers(family: str) -> list[list[int]]:
    texts = []
    for seed, length in enumerate(PROMPT_LENS):
        prompt = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(seed))
        output = reference(family).generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_NEW, do_sample=False
        )
        texts.append(output[0].tolist())
    return texts


def run(
    model: DecoderModel, texts: list[list[int]], chunk_size: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All texts in one batch, cut into chunks: (logits of each text's end, every layer's KV in order)."""
    nums_pages = [-(-len(text) // 16) for text in texts]
    kv = DeviceKVCache(model.spec, model.layers, sum(nums_pages), 16, model.dtype)
    tables = [kv.pages.allocate(num)[::-1] for num in nums_pages]
    ends: dict[int, torch.Tensor] = {}
    for begin in range(0, max(map(len, texts)), chunk_size):
        running = [i for i, text in enumerate(texts) if begin < len(text)]
        chunks = [Chunk(texts[i][begin : begin + chunk_size], begin, tables[i]) for i in running]
        ends.update(zip(running, model.forward(Batch.build(chunks, kv), kv), strict=True))
    order = [page for table in tables for page in table]
    return torch.stack([ends[i] for i in range(len(texts))]), [kv.layer(i)[order] for i in model.layers]


@on_every_isa
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_size", [512, 40])
def test_greedy_tokens_equal_transformers(
    isa: Isa, family: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, isa.value)
    model = load(family)
    assert (model.computed_by, model.fallback_reason) == (isa.value, "")
    texts = greedy_by_transformers(family)
    prompts = [text[:length] for text, length in zip(texts, PROMPT_LENS, strict=True)]
    kv = DeviceKVCache(model.spec, model.layers, 80, 8, torch.float32)
    tables = [kv.pages.allocate(-(-len(text) // 8)) for text in texts]
    assert greedy_in_batch(model, kv, tables, prompts, NUM_NEW, chunk_size) == texts


@on_every_isa
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_and_kv_have_the_same_bits_however_the_work_is_cut_and_batched(
    isa: Isa, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, isa.value)
    model, texts = load(family, dtype), greedy_by_transformers(family)
    logits, kv_layers = run(model, texts, 512)
    for chunk_size in (64, 33, 1):
        cut_logits, cut_layers = run(model, texts, chunk_size)
        assert torch.equal(cut_logits, logits), chunk_size
        assert all(map(torch.equal, cut_layers, kv_layers)), chunk_size
    for i, text in enumerate(texts):
        assert torch.equal(run(model, [text], 512)[0][0], logits[i])


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoded_token_has_the_same_bits_beside_more_sequences_than_a_thread_multiplies_at_a_time(
    isa: Isa, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, isa.value)
    model = load("llama", dtype)
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(512, (1 + i % 20,), generator=generator).tolist() for i in range(ROWS_OF_BLOCK + 5)
    ]
    logits, _ = run(model, texts, 1)
    for i in range(0, len(texts), 6):
        assert torch.equal(run(model, texts[i : i + 1], 512)[0][0], logits[i]), i


def test_the_number_of_threads_changes_no_bit() -> None:
    model, texts = load("llama", torch.bfloat16), greedy_by_transformers("llama")
    results = []
    try:
        for num_threads in (1, 2, 4):
            model.use_idle_cores(num_threads)
            results.append(run(model, texts, 40)[0])
    finally:
        model.use_idle_cores(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_as_close_to_float32_as_torchs(family: str) -> None:
    texts = greedy_by_transformers(family)
    exact = run(load(family), texts, 512)[0]
    by_torch = run(load(family, torch.bfloat16, allow_native=False), texts, 512)[0]
    native = run(load(family, torch.bfloat16), texts, 512)[0]
    assert (native - exact).norm() < 1.2 * (by_torch - exact).norm()


def test_stages_give_the_logits_of_the_whole_model() -> None:
    whole = load("llama")
    spec, weights = whole.spec, reference("llama").state_dict()
    text = greedy_by_transformers("llama")[1]
    hidden: torch.Tensor | None = None
    for layers in (range(1), range(1, 3)):
        stage = DecoderModel(spec, layers, torch.float32)
        stage.load_weights(weights.items())
        kv = DeviceKVCache(spec, layers, 4, 16, torch.float32)
        batch = Batch.build([Chunk(text, 0, kv.pages.allocate(3))], kv)
        hidden = stage.embed(batch) if hidden is None else hidden
        for layer in layers:
            hidden = stage.forward_layer(layer, hidden, batch, kv)
    assert hidden is not None
    assert torch.equal(stage.logits(hidden[-1:]), run(whole, [text], 512)[0])


@pytest.mark.parametrize("family", ["llama", "llama_bias"])
@pytest.mark.parametrize("layers", [range(2), range(1, 3)], ids=["with the first", "with the last"])
def test_freed_layers_compute_the_same_bits_when_they_have_been_loaded_again(
    family: str, layers: range
) -> None:
    model, texts = load(family), greedy_by_transformers(family)
    state, expected = reference(family).state_dict(), run(model, texts, 512)[0]
    model.free_layers(layers)
    assert (model.freed_layers, model.freed_bytes) == (layers, 2 * model.layer_bytes)
    with pytest.raises(KeyError):
        run(model, texts, 512)
    with pytest.raises(WeightsError, match="tensors are missing"):
        model.load_freed_layers(lambda weights: weights.load([]))
    assert model.freed_layers == layers
    model.load_freed_layers(lambda weights: weights.load(state.items()))
    assert (model.freed_layers, model.freed_bytes) == (range(0), 0)
    assert torch.equal(run(model, texts, 512)[0], expected)


def test_a_model_that_the_kernels_cannot_compute_is_computed_by_torch_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENV, SUPPORTED[-1].value)
    spec = ModelSpec("LlamaForCausalLM", 32, 32, 32, 1, 1, 1, 32, 64)
    with caplog.at_level(logging.WARNING):
        model = DecoderModel(spec, range(1), torch.float32)
    assert model.computed_by == "torch"
    assert model.fallback_reason == "head_dim 32 is not one of 64, 96, 128"
    assert model.fallback_reason in caplog.text


def test_torch_can_be_asked_for_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = load("llama", allow_native=False)
    assert (model.computed_by, model.fallback_reason) == ("torch", "torch was asked for")
    assert not caplog.records
