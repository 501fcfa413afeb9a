"""Which blocks are hot, and for how long that is remembered."""

import pytest

from conductor.replication.heat import HALF_LIFE_S, MOST_KEYS, MOST_NOTED_BLOCKS, Heat


def keys_of(prompt: str, num_blocks: int) -> list[bytes]:
    return [f"{prompt} {index}".encode().ljust(16) for index in range(num_blocks)]


def test_uses_fade_and_unused_blocks_are_forgotten() -> None:
    heat = Heat()
    keys = keys_of("a", 3)
    for _ in range(4):
        heat.note(keys)
    assert heat.uses(keys[0]) == 0, "nothing is counted by a decision"
    assert heat.count() == [keys] * 4
    assert heat.uses(keys[2]) == 4
    heat.fade(HALF_LIFE_S)
    assert heat.count() == []
    assert heat.uses(keys[2]) == pytest.approx(2)
    heat.fade(3 * HALF_LIFE_S)
    assert len(heat) == 0


def test_the_first_blocks_of_many_prompts_are_hotter_than_the_rest() -> None:
    heat = Heat()
    shared = keys_of("shared", 5)
    prompts = [[*shared, *keys_of(f"own {number}", 3)] for number in range(4)]
    for prompt in prompts:
        heat.note(prompt)
    heat.note(shared[:2])
    heat.count()
    assert [heat.depth(prompts[0], least) for least in (0, 1, 3, 4, 5)] == [8, 5, 5, 2, 0]


def test_it_remembers_so_many_blocks_the_hottest_and_the_first_of_a_prompt_rather_than_the_last() -> None:
    heat = Heat()
    num_prompts = MOST_KEYS // 150
    cold = [[keys_of(f"cold {part} {number}", 100) for number in range(num_prompts)] for part in range(3)]
    hot = keys_of("hot", 100)
    for prompts in (cold[0], cold[1], [*cold[2], hot, hot]):
        for prompt in prompts:
            heat.note(prompt)
        assert len(heat.count()) == len(prompts)
    assert len(heat) == MOST_KEYS // 2
    assert heat.depth(hot, 1) == 100
    depths = [heat.depth(prompt, 0) for prompts in cold for prompt in prompts]
    assert sum(depths) == len(heat) - 100, "what is remembered of a prompt begins with its first block"
    assert sum(0 < depth < 100 for depth in depths) == 1


def test_more_than_it_can_count_in_one_go_is_left_out() -> None:
    heat = Heat()
    prompt = keys_of("a", 1000)
    for _ in range(MOST_NOTED_BLOCKS // 1000 + 50):
        heat.note(prompt)
    assert len(heat.count()) == MOST_NOTED_BLOCKS // 1000
    heat.note(prompt)
    assert heat.count() == [prompt]
