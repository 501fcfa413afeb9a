"""The model on the GPU's kernels against torch's, layer for layer, and decode steps as captured graphs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cuda.skinny_linear import MAX_GATED_ROWS, MAX_ROWS, block_rows
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.triton_device import DEVICE, runs_kernels
from workers.engine import batch as batches
from workers.engine import cuda
from workers.engine.batch import Batch, Chunk
from workers.engine.decode_graphs import Captured, CudaCapture, DecodeGraphs
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.layers import gpu
from workers.engine.layers.gpu import TritonLayers
from workers.engine.layers.reference import TorchLayers
from workers.engine.model import DecoderModel, Layers
from workers.engine.spec import ModelSpec
from workers.engine.tensor_parallel import part_of
from workers.engine.warm_up import warm_up
from workers.engine.weights import Weights
from workers.execution.model_spec import model_spec

pytestmark = runs_kernels

TEXT_LENS = (21, 1, 8)
NUM_NEW = 2
CHUNK_SIZE = 14
NUM_LAYERS = 2  # the interpreter is slow


@lru_cache
def spec_and_weights(family: str) -> tuple[ModelSpec, Weights]:
    """The first layers of a tiny model; a sliding window begins at the second, if there is one."""
    reference = tiny_model(family)
    spec = model_spec(reference.config.to_dict())
    spec = replace(spec, num_layers=NUM_LAYERS, num_full_attention_layers=1)
    weights = Weights(spec, range(NUM_LAYERS), torch.float32, DEVICE, part_of(spec))
    unused = tuple(
        f"model.layers.{layer}." for layer in range(NUM_LAYERS, reference.config.num_hidden_layers)
    )
    weights.load((n, tensor) for n, tensor in reference.state_dict().items() if not n.startswith(unused))
    return spec, weights


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (n + NUM_NEW,), generator=generator).tolist() for n in TEXT_LENS]


def cache(spec: ModelSpec, page_size: int = 8) -> tuple[DeviceKVCache, list[list[int]]]:
    """Pages for `texts()`, those of a text in descending order."""
    kv = DeviceKVCache(spec, range(spec.num_layers), 40, page_size, torch.float32, DEVICE)
    return kv, [kv.pages.allocate(-(-(n + NUM_NEW) // page_size))[::-1] for n in TEXT_LENS]


@torch.inference_mode()
def forward(layers: Layers, batch: Batch, kv: DeviceKVCache) -> torch.Tensor:
    hidden = layers.embed(batch.token_ids)
    for layer in kv.layers:
        hidden = layers.forward_layer(layer, hidden, batch, kv)
    return layers.logits(hidden[batch.last_rows])


def logits(layers: Layers, spec: ModelSpec) -> tuple[list[torch.Tensor], DeviceKVCache]:
    """All texts in one running batch, chunks of some beside single tokens of others: logits of each pass."""
    kv, tables = cache(spec)
    results = []
    begins = [0] * len(TEXT_LENS)
    while running := [i for i, text in enumerate(texts()) if begins[i] < len(text)]:
        chunks = []
        for i in running:
            # The prompt in chunks, then one token after the other, as in decode.
            end = min(begins[i] + CHUNK_SIZE, TEXT_LENS[i]) if begins[i] < TEXT_LENS[i] else begins[i] + 1
            chunks.append(Chunk(texts()[i][begins[i] : end], begins[i], tables[i]))
            begins[i] = end
        results.append(forward(layers, Batch.build(chunks, kv), kv))
    return results, kv


# Every variant of a layer: plain, with biases, a window, norms of heads, a tied embedding.
@pytest.mark.parametrize("family", ["llama3", "llama_bias", "qwen2_window", "qwen3", "smollm2"])
def test_logits_and_kvcache_equal_torchs(family: str) -> None:
    spec, weights = spec_and_weights(family)
    expected, expected_kv = logits(TorchLayers(spec, weights), spec)
    computed, kv = logits(TritonLayers(spec, weights), spec)
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    for layer in kv.layers:
        torch.testing.assert_close(kv.layer(layer), expected_kv.layer(layer), rtol=0, atol=5e-5)


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 2, 17])
@pytest.mark.parametrize("family", ["llama_bias", "qwen3"])
def test_products_of_a_few_rows_equal_torchs(family: str, num_rows: int) -> None:
    """In 16 bits they are the project's own."""
    spec, _ = spec_and_weights(family)
    weights = Weights(spec, range(NUM_LAYERS), torch.float16, DEVICE, part_of(spec))
    weights.init_dummy(0)
    results = []
    for layers in (TritonLayers(spec, weights), TorchLayers(spec, weights)):
        kv = DeviceKVCache(spec, range(NUM_LAYERS), 17, 8, torch.float16, DEVICE)
        batch = Batch.build([Chunk([row], 0, [row]) for row in range(num_rows)], kv)
        results.append(forward(layers, batch, kv))
    torch.testing.assert_close(*results, rtol=0, atol=1e-2 * float(results[1].abs().max()))


def test_a_gpu_with_little_shared_memory_leaves_products_of_a_few_rows_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise no worker would start there: the first such product raises OutOfResources."""
    spec, _ = spec_and_weights("llama_bias")
    weights = Weights(spec, range(NUM_LAYERS), torch.float16, DEVICE, part_of(spec))
    weights.init_dummy(0)
    asked: list[int] = []
    monkeypatch.setattr(gpu, "skinny_linear", lambda rows, *_, **__: asked.append(len(rows)))
    monkeypatch.setattr(gpu, "has_room", lambda _: False)
    kv = DeviceKVCache(spec, range(NUM_LAYERS), 17, 8, torch.float16, DEVICE)
    for num_rows in (1, 2, 17):
        batch = Batch.build([Chunk([row], 0, [row]) for row in range(num_rows)], kv)
        assert forward(TritonLayers(spec, weights), batch, kv).isfinite().all()
    assert asked == []


def test_a_layer_leaves_its_input_alone() -> None:
    spec, weights = spec_and_weights("llama3")
    kv, tables = cache(spec)
    batch = Batch.build([Chunk(texts()[0][:20], 0, tables[0])], kv)
    hidden = torch.randn(20, spec.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    before = hidden.clone()
    TritonLayers(spec, weights).forward_layer(0, hidden, batch, kv)
    assert torch.equal(hidden, before)


class NoHostTraffic(TorchDispatchMode):
    """Fails on reading a number from the device, and on sending or converting a tensor."""

    _FORBIDDEN = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten._to_copy.default,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self._FORBIDDEN, f"{func} in a layer"
        return func(*args, **(kwargs or {}))


def test_no_layer_reads_from_the_device_or_sends_anything_to_it() -> None:
    spec, weights = spec_and_weights("qwen3")
    layers = TritonLayers(spec, weights)
    kv, tables = cache(spec)
    batch = Batch.build([Chunk(texts()[0][:9], 0, tables[0]), Chunk([1], 0, tables[1])], kv)
    with torch.inference_mode():
        hidden = layers.forward_layer(0, layers.embed(batch.token_ids), batch, kv)  # uploads
        with NoHostTraffic():
            layers.logits(layers.forward_layer(1, hidden, batch, kv))


def test_pages_that_are_not_there_are_refused_before_anything_is_written() -> None:
    spec = spec_and_weights("llama3")[0]
    kv, _ = cache(spec)
    with pytest.raises(ValueError, match=r"pages in \[0, 40\), got 40"):
        Batch.build([Chunk([1, 2], 0, [40])], kv)


class RecordedCapture:
    """Where there are no graphs: a replay computes again, into the same output."""

    def __init__(self) -> None:
        self.num_captured = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Captured:
        self.num_captured += 1
        output = compute().clone()

        def replay() -> None:
            output.copy_(compute())

        return Captured(output, replay)


class CountingCapture(RecordedCapture):
    """Real graphs."""

    def __init__(self) -> None:
        super().__init__()
        self._capture = CudaCapture(DEVICE)

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Captured:
        self.num_captured += 1
        return self._capture(compute)


def graphs_over(layers: TritonLayers, kv: DeviceKVCache) -> tuple[DecodeGraphs, RecordedCapture]:
    capture = CountingCapture() if DEVICE.type == "cuda" else RecordedCapture()
    return DecodeGraphs(layers, kv, capture), capture


def decode_batch(kv: DeviceKVCache, tables: list[list[int]], texts_in_it: range, step: int) -> Batch:
    return Batch.build(
        [Chunk([texts()[i][TEXT_LENS[i] + step]], TEXT_LENS[i] + step, tables[i]) for i in texts_in_it], kv
    )


def test_decode_by_graphs_equals_decode_without() -> None:
    spec, weights = spec_and_weights("qwen2_window")
    layers = TritonLayers(spec, weights)
    (kv, tables), (other_kv, other_tables) = cache(spec), cache(spec)
    for pages, cached in ((tables, kv), (other_tables, other_kv)):
        prompts = [Chunk(text[:n], 0, p) for text, n, p in zip(texts(), TEXT_LENS, pages, strict=True)]
        forward(layers, Batch.build(prompts, cached), cached)
    graphs, capture = graphs_over(layers, kv)
    # Three sequences share a bucket of 4 and leave one place empty, one has a graph of its own.
    for running, step in ((range(3), 0), (range(1), 1), (range(3), 1)):
        batch = decode_batch(kv, tables, running, step)
        assert graphs.can_compute(batch)
        with torch.inference_mode():
            computed = graphs.forward(batch)
        expected = forward(layers, decode_batch(other_kv, other_tables, running, step), other_kv)
        assert computed.dtype is torch.float32
        torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        for layer in kv.layers:
            torch.testing.assert_close(kv.layer(layer), other_kv.layer(layer), rtol=0, atol=5e-5)
    assert capture.num_captured == 2


def test_tokens_that_are_filled_in_are_those_that_layers_and_graphs_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, weights = spec_and_weights("llama3")
    layers = TritonLayers(spec, weights)
    kv, tables = cache(spec)
    graphs, _ = graphs_over(layers, kv)

    def uploaded(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        return [torch.tensor(array, device=device) for array in arrays]  # not the arrays' memory

    monkeypatch.setattr(batches, "upload", uploaded)
    expected = forward(layers, Batch.build([Chunk([7], 0, tables[0]), Chunk([8], 0, tables[1])], kv), kv)
    late = [Batch.build([Chunk([7], 0, tables[0]), Chunk([1], 0, tables[1])], kv) for _ in range(2)]
    for batch in late:
        batch.fill_in([1], [8])
    with torch.inference_mode():
        by_graph = graphs.forward(late[0])
    torch.testing.assert_close(by_graph, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(forward(layers, late[1], kv), expected)


def test_only_single_tokens_within_the_buckets_are_computed_by_graphs() -> None:
    spec, weights = spec_and_weights("llama3")
    kv, tables = cache(spec)
    graphs, _ = graphs_over(TritonLayers(spec, weights), kv)
    single = Chunk([1], 0, tables[0])
    assert graphs.can_compute(Batch.build([single] * 2, kv))
    assert not graphs.can_compute(Batch.build([single, Chunk([1, 2], 0, tables[1])], kv))
    assert not graphs.can_compute(Batch.build([single] * 257, kv))
    # More pages in all tables than the cache has can only be shared ones.
    assert not graphs.can_compute(Batch.build([Chunk([1], 16, tables[0])] * 14, kv))


@pytest.mark.parametrize(
    ("difference", "dtype", "reason"),
    [
        ({}, torch.float32, ""),
        ({"head_dim": 512}, torch.bfloat16, "head_dim 512 is more than 256"),
        ({"num_heads": 64}, torch.bfloat16, "64 query heads a KV head are more than 32"),
        (
            {"is_opt": True},
            torch.float32,
            "the project's kernels have no LayerNorms, learned positions and plain MLPs, which"
            " LlamaForCausalLM needs",
        ),
        ({}, torch.float64, "torch.float64 is not one of torch.float32, torch.bfloat16, torch.float16"),
    ],
)
def test_what_the_kernels_cannot_compute_has_a_reason(
    difference: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "max_position": 64}
    spec = ModelSpec(
        "LlamaForCausalLM", vocab_size=32, hidden_size=64, intermediate_size=64, **{**sizes, **difference}
    )
    assert cuda.unsupported(spec, dtype) == reason


def test_a_warm_up_takes_no_pages_and_leaves_the_model_as_it_was() -> None:
    spec = spec_and_weights("llama3")[0]
    model = DecoderModel(spec, range(spec.num_layers), torch.float32, DEVICE)
    model.init_dummy_weights()
    results = []
    for is_warm in (False, True):
        kv = DeviceKVCache(spec, model.layers, 4, 8, torch.float32, DEVICE)
        if is_warm:
            warm_up(model, kv, chunk_len=100, max_batch=3)
        assert kv.pages.num_free == 4
        results.append(model.forward(Batch.build([Chunk([1, 2, 3], 0, kv.pages.allocate(1))], kv), kv))
    assert torch.equal(*results)


@pytest.mark.parametrize("layers", [range(1), range(1, NUM_LAYERS)], ids=["first stage", "last stage"])
def test_a_stage_of_a_pipeline_is_warmed_up_too(layers: range) -> None:
    spec = spec_and_weights("llama3")[0]
    model = DecoderModel(spec, layers, torch.float32, DEVICE)
    model.init_dummy_weights()
    kv = DeviceKVCache(spec, layers, 4, 8, torch.float32, DEVICE)
    warm_up(model, kv)
    assert kv.pages.num_free == 4


def test_a_warm_up_compiles_the_products_of_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt may end with a pass of any length, and a pass may end several prompts."""
    spec = spec_and_weights("llama3")[0]
    model = DecoderModel(spec, range(1, NUM_LAYERS), torch.float32, DEVICE)
    model.init_dummy_weights()
    kv = DeviceKVCache(spec, model.layers, 20, 8, torch.float32, DEVICE)
    layer, head = model.forward_layer, model.logits
    rows: set[int] = set()
    head_rows: set[int] = set()

    def forward_layer(number: int, hidden: torch.Tensor, batch: Batch, kv: DeviceKVCache) -> torch.Tensor:
        rows.add(len(hidden))
        return layer(number, hidden, batch, kv)

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        head_rows.add(len(hidden))
        return head(hidden)

    monkeypatch.setattr(model, "forward_layer", forward_layer)
    monkeypatch.setattr(model, "logits", logits_of)
    warm_up(model, kv, chunk_len=150)
    for computed, most_rows in ((rows, MAX_GATED_ROWS), (head_rows, MAX_ROWS)):
        assert set(map(block_rows, computed)) >= set(map(block_rows, range(1, most_rows + 1)))


@pytest.mark.parametrize(
    ("max_batch", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 4]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (33, [1, 2, 4, 8, 16, 24, 32, 40]),
    ],
)
def test_a_batch_of_any_size_has_one_of_the_graphs_that_are_captured(
    max_batch: int, expected: list[int]
) -> None:
    assert cuda.graph_sizes(max_batch) == expected


def test_no_more_graphs_are_captured_than_there_are() -> None:
    assert cuda.graph_sizes(1000) == cuda.graph_sizes(256)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_on_a_gpu_the_model_is_computed_by_these_layers_and_its_decode_steps_by_graphs() -> None:
    spec = spec_and_weights("llama3")[0]
    model = DecoderModel(spec, range(spec.num_layers), torch.float32, DEVICE)
    model.init_dummy_weights()
    assert (model.computed_by, model.fallback_reason) == ("triton", "")
    slow = DecoderModel(spec, range(spec.num_layers), torch.float32, DEVICE, allow_native=False)
    slow.init_dummy_weights()
    assert slow.computed_by == "torch"
    for chunk in ([1, 2, 3], [4]):
        results = []
        for each in (model, slow):
            kv, tables = cache(spec)
            results.append(each.forward(Batch.build([Chunk(chunk, 0, tables[0])], kv), kv))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)
