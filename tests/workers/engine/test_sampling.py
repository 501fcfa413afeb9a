"""Drawing tokens: filters, independence of the batch, and the distribution itself."""

import numpy as np
import pytest
import torch

from tests.triton_device import DEVICE
from workers.engine import sampling
from workers.engine.sampling import DrawLimits, logprobs, sample, uniform

VOCAB_SIZE = 3000


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    # Rounded to bfloat16, as a model's are: equal logits are common.
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    return logits.bfloat16().float().to(DEVICE)


def draw(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Each row with its own draw."""
    num_rows = len(logits)
    limits = [np.full(num_rows, value) for value in (temperature, top_k, top_p, min_p)]
    uniforms = np.array([uniform(seed, row) for row in range(num_rows)])
    return sample(logits, DrawLimits(*limits, uniforms)).tolist()


def test_uniform_depends_on_seed_and_position_only_and_fills_the_interval() -> None:
    assert uniform(3, 5) == uniform(3, 5)
    values = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(values)) == 2000
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 2000 - 0.5) < 0.03
    assert uniform(1, 23) != uniform(12, 3)


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"top_k": 5, "top_p": 1e-9}],
)
def test_is_greedy_at_every_end_of_the_filters(parameters: dict[str, float]) -> None:
    logits = random_logits(32)
    assert draw(logits, **parameters) == logits.argmax(-1).tolist()  # type: ignore[arg-type]


def test_equal_logits_rank_by_token_id() -> None:
    logits = torch.zeros(200, VOCAB_SIZE)
    assert draw(logits, top_k=1) == [0] * 200
    logits[:, 0] = -0.0
    assert draw(logits, top_k=1) == [0] * 200
    assert set(draw(logits, top_k=4)) == {0, 1, 2, 3}
    # 400 candidates: more than are ranked without sorting the vocabulary.
    assert max(draw(logits, top_k=400)) < 400
    assert 300 < max(draw(logits, top_p=400 / VOCAB_SIZE)) < 401


def test_a_token_does_not_depend_on_its_batch() -> None:
    logits = random_logits(12)
    limits = DrawLimits(
        np.array([0.0, 0.7, 1.0, 1.5] * 3),
        np.array([0, 0, 50, 700, 3, 0, 0, 2, 0, 290, 0, 0]),
        np.array([1.0, 0.9, 1.0, 0.95, 0.5, 1.0, 0.3, 1.0, 1.0, 0.99, 0.999, 1.0]),
        np.array([0.0, 0.0, 0.1, 0.0, 0.3, 0.0, 0.0, 0.02, 0.0, 0.0, 0.5, 0.0]),
        np.array([uniform(9, row) for row in range(12)]),
    )
    together = sample(logits, limits)
    for row in range(12):
        only = np.array([row])
        assert sample(logits[only], limits.of(only)).item() == together[row].item()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0), (5, 1.0, 0), (0, 0.8, 0), (6, 0.7, 0), (0, 1.0, 0.3), (5, 0.8, 0.2), (3, 1.0, 0.1)],
)
def test_frequencies_follow_the_filtered_distribution(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.1, 0.0, 1.7, -0.4, 0.9])
    temperature, num_draws = 1.3, 4000
    probabilities = (logits.double() / temperature).softmax(-1)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    if top_k:
        probabilities[probabilities.argsort(descending=True)[top_k:]] = 0
        probabilities /= probabilities.sum()
    order = probabilities.argsort(descending=True)
    mass_before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[mass_before >= top_p]] = 0
    expected = probabilities / probabilities.sum() * num_draws

    tokens = draw(logits.expand(num_draws, -1), temperature, top_k, top_p, min_p, seed=1)
    counts = torch.bincount(torch.tensor(tokens), minlength=8)
    is_kept = expected > 0
    assert not counts[~is_kept].any()
    chi_square = ((counts - expected)[is_kept] ** 2 / expected[is_kept]).sum().item()
    # 99.9% quantiles of chi-square with 1 to 7 degrees of freedom.
    assert chi_square < [10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3][int(is_kept.sum()) - 2]


def test_top_p_deep_in_a_large_vocabulary_keeps_exactly_its_nucleus() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 0.1
    ranked = logits[0].double().softmax(-1).sort(descending=True)
    mass_before = ranked.values.cumsum(0) - ranked.values
    nucleus = set(ranked.indices[mass_before < 0.5].tolist())
    assert 1000 < len(nucleus) < 2000
    drawn = set(draw(logits.expand(3000, -1), top_p=0.5))
    assert drawn <= nucleus
    assert len(drawn) > 800


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_draws_are_the_same_however_many_tokens_are_ranked(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(64) * spread
    logits[::5, ::3] = float("-inf")
    filters = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.3, 1.0, 2.0)
        for top_k in (0, 1, 7, 30, 400)
        for top_p in (1.0, 0.999, 0.5, 0.01)
        for min_p in (0.0, 0.02, 0.9)
    ]
    draws = []
    for num_ranked in (7, VOCAB_SIZE):
        monkeypatch.setattr(sampling, "_NUM_LIKELY", num_ranked)
        draws.append([draw(logits, *limits, seed=5) for limits in filters])
    assert draws[0] == draws[1]


def test_never_draws_a_forbidden_token() -> None:
    logits = torch.full((300, 50), float("-inf"))
    logits[:, 10], logits[:, 40] = -2.0, 1.0
    assert set(draw(logits)) == {10, 40}
    almost_one = np.full(300, 1 - 2.0**-53)
    for top_k in (0, 20):
        limits = DrawLimits(*(np.full(300, value) for value in (1.0, top_k, 1.0, 0.0)), almost_one)
        assert set(sample(logits, limits).tolist()) == {10 if top_k else 40}


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_row_without_probabilities_draws_a_token_and_spoils_no_other(value: float, top_k: int) -> None:
    logits = random_logits(3, vocab_size=50)
    expected = draw(logits, top_k=top_k)
    logits[1] = value
    drawn = draw(logits, top_k=top_k)
    assert 0 <= drawn[1] < 50
    assert [drawn[0], drawn[2]] == [expected[0], expected[2]]


def test_min_p_1_keeps_the_likeliest_and_its_equals() -> None:
    logits = torch.zeros(300, 10)
    logits[:, 3] = logits[:, 6] = 0.01
    assert set(draw(logits, min_p=1.0)) == {3, 6}


def test_logprobs_are_those_of_log_softmax_and_rank_by_id_when_equal() -> None:
    logits = random_logits(5)
    logits[0] = 0.0
    tokens = (logits.argmax(-1) + 7) % VOCAB_SIZE
    expected = logits.double().log_softmax(-1)
    computed = logprobs(logits, tokens, 4)
    torch.testing.assert_close(computed.drawn, expected.gather(-1, tokens[:, None])[:, 0].float())
    torch.testing.assert_close(computed.top, expected.topk(4).values.float())
    assert computed.top_tokens[0].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(computed.top, expected.gather(-1, computed.top_tokens).float())
    assert logprobs(logits, tokens, 0).top.shape == (5, 0)
