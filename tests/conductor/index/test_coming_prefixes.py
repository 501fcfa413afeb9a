"""Prefixes that are coming: the radix trees against plain comparisons."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.index.coming_prefixes import EVENT_DELAY_S, Coming, ComingPrefixes, ComingPrompt, _Node
from conductor.index.prefix_index import PrefixMatch
from mooncake.messages.blocks import BlockKey, block_keys, root_key
from tests.examples import num_examples

NUM_SLOTS = 3
Tokens = tuple[int, ...]


def keys_of(tokens: Tokens) -> list[BlockKey]:
    """One block a token, chained."""
    return block_keys(list(tokens), 1, root_key("model"))


def common_len(one: Tokens, other: Tokens) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def by_slot(coming: Coming) -> list[int]:
    """The blocks that are coming to each instance."""
    return [
        max((depth for depth, mask in coming if mask >> slot & 1), default=0) for slot in range(NUM_SLOTS)
    ]


def nodes_of(prefixes: ComingPrefixes) -> list[_Node]:
    found = [node for nodes in prefixes._roots.values() for node in nodes.values()]
    for node in found:
        found += node.children.values()
    return found


prompts = st.lists(st.integers(0, 1), max_size=6).map(tuple)
placed = st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 1), prompts)
steps = st.lists(st.one_of(placed, st.integers(0, 20)), max_size=30)


@settings(max_examples=num_examples(300))
@given(steps, prompts, st.integers(0, 1))
def test_each_instance_will_have_what_the_prompts_placed_there_have_in_common_with_another(
    steps: list[tuple[int, int, Tokens] | int], asked: Tokens, priority: int
) -> None:
    prefixes, present = ComingPrefixes(), list[tuple[ComingPrompt, Tokens]]()
    for step in steps:
        if isinstance(step, int):
            if present:
                prefixes.remove(present.pop(step % len(present))[0])
        else:
            slot, level, tokens = step
            present.append((prefixes.add(slot, level, keys_of(tokens)), tokens))
        expected = [0] * NUM_SLOTS
        for prompt, tokens in present:
            if prompt.priority <= priority:
                expected[prompt.slot] = max(expected[prompt.slot], common_len(tokens, asked))
        assert by_slot(prefixes.match(keys_of(asked), priority, 0.0)) == expected
        assert len(nodes_of(prefixes)) <= 2 * len(present)
    for prompt, _ in present:
        prefixes.remove(prompt)
        prefixes.remove(prompt)
    assert not prefixes._roots


def test_blocks_of_a_computed_prompt_are_coming_until_events_have_told_of_them() -> None:
    prefixes, keys = ComingPrefixes(), keys_of((1, 2, 3))
    prompt = prefixes.add(1, 0, keys)
    prefixes.stored(prompt, now_s=10.0)
    assert prefixes.match(keys, 0, 10.0 + EVENT_DELAY_S / 2) == [(3, 0b010)]
    assert prefixes.match(keys, 0, 10.0 + EVENT_DELAY_S) == []


def test_prompts_of_a_lost_instance_are_not_coming() -> None:
    prefixes, keys = ComingPrefixes(), keys_of((1, 2, 3))
    lost = [prefixes.add(0, 0, keys), prefixes.add(0, 1, keys[:2])]
    prefixes.stored(lost[0], 0.0)
    prefixes.add(2, 0, keys[:1])
    prefixes.forget(0)
    prefixes.remove(lost[1])  # its request ends later
    assert prefixes.match(keys, 1, 9.0) == [(1, 0b100)]


def test_a_long_prefix_is_found_by_a_dozen_comparisons() -> None:
    class CountedKeys(list[BlockKey]):
        num_read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            CountedKeys.num_read += 1
            return super().__getitem__(index)

    prefixes = ComingPrefixes()
    shared = tuple(range(5000))
    prefixes.add(0, 0, CountedKeys(keys_of((*shared, *range(3000)))))
    CountedKeys.num_read = 0
    assert prefixes.match(keys_of((*shared, *range(1, 3000))), 0, 0.0) == [(5000, 0b001)]
    assert CountedKeys.num_read <= 16


@settings(max_examples=num_examples(300))
@given(
    st.lists(st.integers(0, 9), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 2**NUM_SLOTS - 1)), max_size=4),
)
def test_an_instance_will_hold_the_longer_of_what_it_holds_and_what_comes(
    held: list[int], coming: Coming
) -> None:
    depths = sorted(Counter(held))
    masks = [sum(1 << slot for slot in range(NUM_SLOTS) if held[slot] == depth) for depth in depths]
    match = PrefixMatch(NUM_SLOTS, depths, masks, []).with_coming(coming)
    both = [max(pair) for pair in zip(held, by_slot(coming), strict=True)]
    assert [match.num_blocks_at(slot) for slot in range(NUM_SLOTS)] == both
    assert match.depths == sorted(set(both))
    assert sum(match.masks) == 2**NUM_SLOTS - 1
