"""Ranks of a tensor-parallel group compute what the whole model does, and each holds its part only."""

from functools import lru_cache

import pytest
import torch

from tests.tiny_models import FAMILIES, tiny_model
from tests.workers.engine.ranks import Outcome, ThreadGroup, generate, on_ranks
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec, UnsupportedModel
from workers.engine.tensor_parallel import TensorShard, kv_heads_of, part_of
from workers.execution.model_spec import model_spec

PROMPT_LENS = (37, 1, 20)
NUM_NEW = 6
CHUNK_SIZE = 17

# Sizes that the CPU's kernels compute, with three KV heads; 112 columns of the MLP are 64 + 48, 48 + 32 + 32.
WIDE: dict[str, dict[str, float | None]] = {
    "llama3": {"head_dim": 64, "num_attention_heads": 6},
    "llama_bias": {"head_dim": 96, "num_attention_heads": 3},
    "mistral": {"head_dim": 128, "num_attention_heads": 6},
    "qwen2_window": {"head_dim": None, "num_attention_heads": 6, "hidden_size": 384},
    "qwen3": {"head_dim": 64, "num_attention_heads": 3},
    "smollm2": {"head_dim": 64, "num_attention_heads": 9},
}
COMMON: dict[str, float | None] = {
    "hidden_size": 144,
    "intermediate_size": 112,
    "num_key_value_heads": 3,
    "vocab_size": 511,
    "initializer_range": 0.1,
}


@lru_cache
def reference(family: str, is_wide: bool) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    model = tiny_model(family, **({**COMMON, **WIDE[family]} if is_wide else {}))
    return model_spec(model.config.to_dict()), dict(model.state_dict())


def prompts() -> list[list[int]]:
    return [
        torch.randint(500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in PROMPT_LENS
    ]


def run_rank(
    family: str,
    *,
    is_wide: bool,
    is_native: bool,
    shards: list[TensorShard] | None = None,
    dtype: torch.dtype = torch.float32,
    chunk_size: int = CHUNK_SIZE,
) -> Outcome:
    """With a shard for each of the rank's stages, or else the whole model."""
    spec, weights = reference(family, is_wide)
    cuts = [0, spec.num_layers] if shards is None or len(shards) == 1 else [0, 1, spec.num_layers]
    stages = []
    for first, end, shard in zip(cuts, cuts[1:], shards or [None], strict=False):
        stage = DecoderModel(spec, range(first, end), dtype, shard=shard, allow_native=is_native)
        assert (stage.computed_by != "torch") == is_native, stage.fallback_reason
        stage.load_weights(weights.items())
        stages.append(stage)
    return generate(stages, prompts(), NUM_NEW, chunk_size)


def run_group(family: str, size: int, *, num_stages: int = 1, **options: bool) -> list[Outcome]:
    groups = [ThreadGroup(size) for _ in range(num_stages)]
    reference(family, options["is_wide"])  # made once, before the ranks' threads share torch's generator
    return on_ranks(
        size, lambda rank: run_rank(family, shards=[group.shards[rank] for group in groups], **options)
    )


def assert_equal(ranks: list[Outcome], whole: Outcome) -> None:
    for rank in ranks:
        assert rank.tokens == whole.tokens
        assert all(map(torch.equal, rank.logits, ranks[0].logits)), "ranks differ"
    kv = [torch.cat(parts, dim=1) for parts in zip(*(rank.kv for rank in ranks), strict=True)]
    for got, expected in zip([*ranks[0].logits, *kv], [*whole.logits, *whole.kv], strict=True):
        # Of the largest: a small result is a sum of numbers as large as the others'.
        torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_the_whole_model_does(family: str) -> None:
    whole = run_rank(family, is_wide=False, is_native=False)
    for size in range(1, 1 + min(3, reference(family, False)[0].num_kv_heads)):
        assert_equal(run_group(family, size, is_wide=False, is_native=False), whole)


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
def test_uneven_parts_compute_what_the_whole_model_does(family: str, is_native: bool) -> None:
    whole = run_rank(family, is_wide=True, is_native=is_native)
    for size in (1, 2, 3):
        assert_equal(run_group(family, size, is_wide=True, is_native=is_native), whole)


@pytest.mark.parametrize("family", ["llama_bias", "smollm2"])
@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
def test_two_stages_of_two_ranks_compute_what_the_whole_model_does(family: str, is_native: bool) -> None:
    whole = run_rank(family, is_wide=True, is_native=is_native)
    assert_equal(run_group(family, 2, num_stages=2, is_wide=True, is_native=is_native), whole)


def test_bfloat16_logits_of_ranks_are_as_close_to_float32_as_the_whole_models() -> None:
    def first_logits(outcome: Outcome) -> torch.Tensor:
        return outcome.logits[0][0]

    exact = first_logits(run_rank("llama_bias", is_wide=True, is_native=True))
    options = {"is_wide": True, "is_native": True, "dtype": torch.bfloat16}
    whole = first_logits(run_rank("llama_bias", **options))
    ranks = first_logits(run_group("llama_bias", 3, **options)[0])
    assert (ranks - exact).norm() < 1.3 * (whole - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuts_and_batches_change_no_bit_of_what_the_kernels_compute(dtype: torch.dtype) -> None:
    options = {"is_wide": True, "is_native": True, "dtype": dtype}
    outcomes = [run_group("llama3", 3, chunk_size=size, **options)[1] for size in (512, 17, 1)]
    for cut in outcomes[1:]:
        assert all(map(torch.equal, cut.kv, outcomes[0].kv))
        assert all(map(torch.equal, cut.logits, outcomes[0].logits))


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "lengths"), [(3, 2, [2, 1]), (8, 3, [3, 3, 2]), (4, 4, [1] * 4)]
)
def test_every_head_and_column_and_token_belongs_to_one_rank(
    num_kv_heads: int, size: int, lengths: list[int]
) -> None:
    spec = ModelSpec("LlamaForCausalLM", 97, 64, 176, 2, 3 * num_kv_heads, num_kv_heads, 16, 64)
    parts = [part_of(spec, rank, size) for rank in range(size)]
    assert [len(part.kv_heads) for part in parts] == lengths
    assert [part.kv_heads for part in parts] == [kv_heads_of(spec, rank, size) for rank in range(size)]
    assert [i for part in parts for i in part.kv_heads] == list(range(num_kv_heads))
    assert [i // 3 for part in parts for i in part.heads] == [
        i for i in range(num_kv_heads) for _ in range(3)
    ]
    assert [i for part in parts for i in part.mlp_columns] == list(range(176))
    assert all(len(part.mlp_columns) % 16 == 0 for part in parts)
    assert [i for part in parts for i in part.vocab] == list(range(97))
    assert [part.adds_bias for part in parts].count(True) == 1


class TestRefuses:
    spec = ModelSpec("LlamaForCausalLM", 64, 32, 32, 1, 6, 3, 16, 64)

    def test_more_ranks_than_kv_heads(self) -> None:
        with pytest.raises(UnsupportedModel, match="group of 4 needs 4 KV heads or more, the model has 3"):
            DecoderModel(self.spec, range(1), torch.float32, shard=ThreadGroup(4).shards[0])

    def test_more_ranks_than_parts_of_the_mlp(self) -> None:
        with pytest.raises(UnsupportedModel, match="intermediate_size of 48 or more, the model has 32"):
            part_of(self.spec, 0, 3)

    def test_a_rank_outside_of_its_group(self) -> None:
        with pytest.raises(ValueError, match=r"a rank in \[0, 2\), got 2"):
            kv_heads_of(self.spec, 2, 2)
        shard = ThreadGroup(1).shards[0]
        with pytest.raises(ValueError, match=r"a rank in \[0, 1\), got -1"):
            TensorShard(-1, 1, shard.all_reduce, shard.all_gather)

    def test_the_kvcache_of_other_heads(self) -> None:
        model = DecoderModel(self.spec, range(1), torch.float32, shard=ThreadGroup(2).shards[0])
        kv = DeviceKVCache(self.spec, range(1), 1, 8, torch.float32)
        batch = Batch.build([Chunk([1], 0, [0])], kv)
        with pytest.raises(AssertionError, match=r"KV heads range\(0, 3\), not range\(0, 2\)"):
            model.forward_layer(0, torch.zeros(1, 32), batch, kv)

    def test_a_token_that_no_rank_has(self) -> None:
        kv = DeviceKVCache(self.spec, range(1), 1, 8, torch.float32)
        for token in (-1, 64):
            with pytest.raises(ValueError, match=rf"token ids in \[0, 64\), got {token}"):
                Batch.build([Chunk([token], 0, [0])], kv)
