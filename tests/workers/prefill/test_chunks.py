"""Chunks of a pipeline: they cover the prompt and take equally long."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.prefill.chunks import ChunkPlan, LayerCosts

SMOLLM2 = LayerCosts(token=2.0 * 576 * (2 * 576 + 2 * 192 + 3 * 1536), pair=4.0 * 576)


@given(
    start=st.integers(0, 50_000),
    num_tokens=st.integers(1, 40_000),
    num_stages=st.integers(1, 4),
    max_tokens=st.integers(1, 64).map(lambda number: 128 * number),
    multiple=st.sampled_from([1, 16, 64, 128]),
)
def test_chunks_cover_the_prompt_once_and_are_not_too_long(
    start: int, num_tokens: int, num_stages: int, max_tokens: int, multiple: int
) -> None:
    end = start + num_tokens
    chunks = ChunkPlan(SMOLLM2, num_stages, max_tokens, multiple)(start, end)
    assert list(itertools.chain(*chunks)) == list(range(start, end))
    assert all(0 < len(chunk) <= max_tokens for chunk in chunks)


@pytest.mark.parametrize("num_tokens", [4096, 8192, 100_000])
def test_chunks_of_a_long_prompt_take_equally_long_and_shrink(num_tokens: int) -> None:
    chunks = ChunkPlan(SMOLLM2, 2, 60_000, 16)(0, num_tokens)
    taken = [SMOLLM2.of_tokens(chunk.start, len(chunk)) for chunk in chunks]
    assert max(taken) < 1.08 * sum(taken) / len(taken)  # they are rounded to blocks
    assert len(chunks[0]) > len(chunks[-1])
    assert all(chunk.start % 16 == 0 for chunk in chunks)


def test_short_prompts_are_not_cut() -> None:
    for num_tokens in (1, 16, 60):
        assert ChunkPlan(SMOLLM2, 2, 1024, 16)(0, num_tokens) == [range(num_tokens)]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("num_tokens", [512, 4096, 30_000])
def test_no_other_number_of_chunks_is_quicker(num_stages: int, num_tokens: int) -> None:
    """By the formula that the plan's documentation gives."""
    cost, of_pass = SMOLLM2.of_tokens(0, num_tokens), 32 * SMOLLM2.token

    def time(num_chunks: int) -> float:
        return (cost + num_chunks * of_pass) * (num_chunks + num_stages - 1) / (num_chunks * num_stages)

    chosen = len(ChunkPlan(SMOLLM2, num_stages, 60_000, 1)(0, num_tokens))
    assert time(chosen) <= 1.001 * min(time(number) for number in range(1, 300))


def test_one_stage_cuts_only_what_is_too_long() -> None:
    assert len(ChunkPlan(SMOLLM2, 1, 4096, 16)(0, 4096)) == 1
    assert len(ChunkPlan(SMOLLM2, 1, 4096, 16)(0, 4097)) == 2


@given(st.integers(0, 100_000), st.integers(1, 100_000))
def test_how_many_tokens_a_cost_buys(start: int, num_tokens: int) -> None:
    assert SMOLLM2.num_tokens(start, SMOLLM2.of_tokens(start, num_tokens)) == pytest.approx(num_tokens)
