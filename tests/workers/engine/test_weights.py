"""What each rank of a tensor-parallel group loads: its part, from whole, stacked and dummy tensors."""

import weakref
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from tests.tiny_models import tiny_model
from workers.engine.spec import ModelSpec
from workers.engine.tensor_parallel import part_of
from workers.engine.weights import LayerWeights, Weights, WeightsError
from workers.execution.model_spec import model_spec

LAYER = "model.layers.0."


@lru_cache
def checkpoint(family: str) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Three KV heads; 112 columns of the MLP; every kind of bias in `llama_bias`; 511 tokens."""
    changes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    model = tiny_model(family, **changes, intermediate_size=112, vocab_size=511)
    return model_spec(model.config.to_dict()), dict(model.state_dict())


def empty(spec: ModelSpec, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Weights:
    layers = range(spec.num_layers)
    return Weights(spec, layers, dtype, torch.device("cpu"), part_of(spec, rank, size))


def loaded(family: str, rank: int = 0, size: int = 1) -> Weights:
    spec, tensors = checkpoint(family)
    weights = empty(spec, rank, size)
    weights.load(tensors.items())
    return weights


def tensors_of(weights: Weights) -> list[torch.Tensor]:
    layers = [getattr(layer, name) for layer in weights.layers.values() for name in LayerWeights.__slots__]
    ends = [weights.embedding, weights.final_norm]
    ends += [] if weights.lm_head is weights.embedding else [weights.lm_head]
    return [tensor for tensor in [*layers, *ends] if tensor is not None]


def unstacked(weights: Weights, layer: int) -> dict[str, torch.Tensor]:
    """This rank's parts under the checkpoint's names."""
    w, spec, part = weights.layers[layer], weights.spec, weights.part
    rows = [len(part.heads) * spec.head_dim, *[len(part.kv_heads) * spec.head_dim] * 2]
    found = {}
    for kind, qkv, gate_up in (("weight", w.qkv, w.gate_up), ("bias", w.qkv_bias, w.gate_up_bias)):
        if qkv is not None:
            found |= {f"self_attn.{p}_proj.{kind}": t for p, t in zip("qkv", qkv.split(rows), strict=True)}
        if gate_up is not None:
            found |= {
                f"mlp.{p}_proj.{kind}": t for p, t in zip(("gate", "up"), gate_up.chunk(2), strict=True)
            }
    return found | {"self_attn.o_proj.weight": w.o, "mlp.down_proj.weight": w.down}


@pytest.mark.parametrize("family", ["llama_bias", "qwen3", "smollm2"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_parts_of_all_ranks_are_the_checkpoints_tensors(family: str, size: int) -> None:
    spec, tensors = checkpoint(family)
    ranks = [loaded(family, rank, size) for rank in range(size)]
    for layer in range(spec.num_layers):
        parts = [unstacked(rank, layer) for rank in ranks]
        for name in parts[0]:
            dim = 1 if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight") else 0
            together = torch.cat([part[name] for part in parts], dim)
            assert torch.equal(together, tensors[f"model.layers.{layer}.{name}"]), name
        for rank in ranks:
            norm = tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]
            assert torch.equal(rank.layers[layer].post_norm, norm)
    together = torch.cat([rank.embedding for rank in ranks])
    assert torch.equal(together, tensors["model.embed_tokens.weight"])
    assert torch.equal(torch.cat([rank.lm_head for rank in ranks]), tensors["lm_head.weight"])
    assert all((rank.lm_head is rank.embedding) == (family == "smollm2") for rank in ranks)


def test_one_rank_has_the_biases_that_are_added_to_sums() -> None:
    _, tensors = checkpoint("llama_bias")
    first, second = (loaded("llama_bias", rank, 2).layers[0] for rank in range(2))
    assert torch.equal(first.o_bias, tensors[f"{LAYER}self_attn.o_proj.bias"])
    assert torch.equal(first.down_bias, tensors[f"{LAYER}mlp.down_proj.bias"])
    assert (second.o_bias, second.down_bias) == (None, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_of_the_wrong_shape_is_refused_by_every_rank(rank: int) -> None:
    spec, tensors = checkpoint("llama_bias")
    name = f"{LAYER}mlp.down_proj.bias"
    with pytest.raises(WeightsError, match=rf"{name}: expected shape \[48\], got \[47\]"):
        empty(spec, rank, 2).load({**tensors, name: torch.zeros(47)}.items())


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_dummy_weights_are_those_of_the_whole_model(rank: int, size: int) -> None:
    spec, tensors = checkpoint("llama_bias")
    whole = empty(spec)
    whole.init_dummy(seed=3)
    names = unstacked(whole, 1)
    layer = {f"model.layers.1.{name}": tensor for name, tensor in names.items()}
    ends = {"model.embed_tokens.weight": whole.embedding, "lm_head.weight": whole.lm_head}
    expected, got = empty(spec, rank, size), empty(spec, rank, size)
    expected.load({**tensors, **layer, **ends}.items())
    got.init_dummy(seed=3)
    for name, tensor in unstacked(expected, 1).items():
        assert torch.equal(unstacked(got, 1)[name], tensor), name
    assert torch.equal(got.embedding, expected.embedding)
    assert torch.equal(got.lm_head, expected.lm_head)
    assert torch.equal(got.layers[1].input_norm, torch.ones(48))


def stacked(tensors: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """As Phi-3's checkpoints have them: one tensor for queries, keys and values, one for gate and up."""
    result = dict(tensors)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            attention = [result.pop(f"{prefix}self_attn.{p}_proj.{kind}") for p in "qkv"]
            mlp = [result.pop(f"{prefix}mlp.{p}_proj.{kind}") for p in ("gate", "up")]
            result[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat(attention)
            result[f"{prefix}mlp.gate_up_proj.{kind}"] = torch.cat(mlp)
    return result


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_stacked_tensors_are_cut_as_their_parts_are(rank: int, size: int) -> None:
    spec, tensors = checkpoint("llama_bias")
    weights = empty(spec, rank, size)
    weights.load(stacked(tensors, spec.num_layers).items())
    expected = loaded("llama_bias", rank, size)
    assert all(map(torch.equal, tensors_of(weights), tensors_of(expected)))


def test_a_stacked_tensor_with_the_wrong_number_of_rows_is_refused() -> None:
    spec, tensors = checkpoint("llama_bias")
    changed = stacked(tensors, spec.num_layers) | {f"{LAYER}self_attn.qkv_proj.weight": torch.zeros(191, 48)}
    with pytest.raises(WeightsError, match=r"layers.0.self_attn.qkv_proj.weight: expected 192 rows, got 191"):
        empty(spec).load(changed.items())


def test_a_rank_has_its_share_of_the_bytes() -> None:
    spec = ModelSpec("LlamaForCausalLM", 512, 64, 128, 3, 8, 4, 16, 64, qkv_bias=True)
    num_bytes = {
        size: sum(t.untyped_storage().nbytes() for t in tensors_of(empty(spec, size - 1, size)))
        for size in (1, 2, 4)
    }
    num_norm_bytes = (2 * 3 + 1) * 64 * 4
    for size in (2, 4):
        assert num_bytes[size] == (num_bytes[1] - num_norm_bytes) / size + num_norm_bytes


def test_the_checkpoints_tensors_are_not_held_while_others_are_loaded() -> None:
    spec, tensors = checkpoint("llama_bias")
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stacked(tensors, spec.num_layers).items():
            copy = tensor.clone()
            storage = copy.untyped_storage()
            seen.append(weakref.ref(storage))
            yield name, copy
            del copy, storage
            assert sum(reference() is not None for reference in seen) <= 1, "only the last one may live"

    empty(spec, 1, 2).load(one_by_one())
    assert len(seen) == len(stacked(tensors, spec.num_layers))
