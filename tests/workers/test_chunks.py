"""Chunks of a pipeline: they cover the prompt and take equally long."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.chunks import ChunkPlan, Costs

SMOLLM2 = Costs(token=2.0 * 576 * (2 * 576 + 2 * 192 + 3 * 1536), pair=4.0 * 576)


@given(
    start=st.integers(0, 50_000),
    num_tokens=st.integers(1, 40_000),
    num_stages=st.integers(1, 4),
    most_tokens=st.integers(1, 64).map(lambda number: 128 * number),
    multiple=st.sampled_from([1, 16, 64, 128]),
)
def test_chunks_cover_the_prompt_once_and_are_not_too_long(
    start: int, num_tokens: int, num_stages: int, most_tokens: int, multiple: int
) -> None:
    end = start + num_tokens
    chunks = ChunkPlan(SMOLLM2, num_stages, most_tokens, multiple)(start, end)
    assert list(itertools.chain(*chunks)) == list(range(start, end))
    assert all(0 < len(chunk) <= most_tokens for chunk in chunks)


@pytest.mark.parametrize("num_tokens", [4096, 8192, 100_000])
def test_chunks_of_a_long_prompt_take_equally_long_and_shrink(num_tokens: int) -> None:
    chunks = ChunkPlan(SMOLLM2, 2, 60_000, 16)(0, num_tokens)
    assert len(chunks) == 16
    taken = [SMOLLM2.of_tokens(chunk.start, len(chunk)) for chunk in chunks]
    assert max(taken) < 1.08 * sum(taken) / len(taken)  # they are rounded to blocks
    assert len(chunks[0]) > len(chunks[-1])
    assert all(chunk.start % 16 == 0 for chunk in chunks)


def test_short_prompts_are_not_cut() -> None:
    for num_tokens in (1, 100, 128, 255):
        chunks = ChunkPlan(SMOLLM2, 2, 1024, 16)(0, num_tokens)
        assert chunks == [range(num_tokens)]


def test_one_stage_cuts_only_what_is_too_long() -> None:
    assert len(ChunkPlan(SMOLLM2, 1, 4096, 16)(0, 4096)) == 1
    assert len(ChunkPlan(SMOLLM2, 1, 4096, 16)(0, 4097)) == 2


@given(st.integers(0, 100_000), st.integers(1, 100_000))
def test_how_many_tokens_a_cost_buys(start: int, num_tokens: int) -> None:
    assert SMOLLM2.num_tokens(start, SMOLLM2.of_tokens(start, num_tokens)) == pytest.approx(num_tokens)
