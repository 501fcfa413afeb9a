"""The order of prefill, and what shares a pass: without time, device or messages."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.messages.aging import NO_DEADLINE_S
from mooncake.messages.blocks import BlockKey
from mooncake.messages.requests import Flow
from tests.examples import num_examples
from workers.prefill.queue import PrefillQueue, PromptState, QueuedPrompt


def ready(
    queue: PrefillQueue,
    num_tokens: int,
    time_left_s: float | None = None,
    now_s: float = 0.0,
    tenant: str = "",
    answer_id: str = "",
) -> QueuedPrompt:
    prompt = queue.add(num_tokens, time_left_s, now_s, flow=Flow(tenant, answer_id))
    queue.ready(prompt, 0)
    return prompt


def compute(queue: PrefillQueue) -> list[tuple[QueuedPrompt, int]]:
    """One pass, as the runner does it."""
    shares = [(share.prompt, share.num_tokens) for share in queue.plan()]
    for prompt, num_tokens in shares:
        prompt.num_done += num_tokens
        if not prompt.num_left:
            queue.remove(prompt)
    return shares


def test_prompts_without_deadlines_go_in_order_of_arrival() -> None:
    queue = PrefillQueue(100)
    first, second = ready(queue, 100), ready(queue, 100, now_s=1.0)
    assert compute(queue) == [(first, 100)]
    assert compute(queue) == [(second, 100)]
    assert compute(queue) == []


def test_earliest_deadline_goes_first_and_overdue_ones_in_order_of_arrival() -> None:
    queue = PrefillQueue(10)
    relaxed = ready(queue, 10, 5.0)
    urgent = ready(queue, 10, 1.0)
    late = ready(queue, 10, -3.0, now_s=0.5)
    later = ready(queue, 10, -9.0, now_s=0.6)
    assert [compute(queue)[0][0] for _ in range(4)] == [late, later, urgent, relaxed]


def test_short_prompts_and_ends_of_prompts_share_a_pass() -> None:
    queue = PrefillQueue(100)
    long, short, shorter, last = (ready(queue, num_tokens) for num_tokens in (150, 20, 5, 60))
    assert compute(queue) == [(long, 100)]
    assert compute(queue) == [(long, 50), (short, 20), (shorter, 5), (last, 25)]
    assert compute(queue) == [(last, 35)]


def test_a_prompt_that_is_to_be_alone_shares_no_pass_and_waits_no_longer_than_others() -> None:
    queue = PrefillQueue(100)
    first = ready(queue, 20)
    suspect = queue.add(130, None, 0.0, is_alone=True)
    queue.ready(suspect, 0)
    last = ready(queue, 10)
    assert compute(queue) == [(first, 20), (last, 10)]
    assert compute(queue) == [(suspect, 100)]
    later = ready(queue, 5)
    assert compute(queue) == [(suspect, 30)]
    assert compute(queue) == [(later, 5)]


def test_no_further_prompt_comes_to_a_pass_that_is_as_fast_as_it_gets() -> None:
    queue = PrefillQueue(100, saturating_tokens=30)
    long, short, shorter, last = (ready(queue, num_tokens) for num_tokens in (150, 20, 10, 5))
    assert compute(queue) == [(long, 100)]
    assert compute(queue) == [(long, 50)]
    assert compute(queue) == [(short, 20), (shorter, 10)]
    assert compute(queue) == [(last, 5)]


def test_a_pass_that_a_short_prompt_begins_is_not_filled_beyond_what_makes_it_faster() -> None:
    queue = PrefillQueue(100, saturating_tokens=30)
    short, long = ready(queue, 20), ready(queue, 150)
    assert compute(queue) == [(short, 20), (long, 10)]
    assert compute(queue) == [(long, 100)]


def test_urgent_prompt_overtakes_a_long_one_between_passes() -> None:
    queue = PrefillQueue(100)
    long = ready(queue, 300)
    assert compute(queue) == [(long, 100)]
    urgent = ready(queue, 30, 1.0)
    assert compute(queue) == [(urgent, 30), (long, 70)]


def test_only_what_is_ready_is_computed() -> None:
    queue = PrefillQueue(100)
    waiting = queue.add(10, None, 0.0)
    admitted = queue.add(10, None, 0.0)
    admitted.state = PromptState.ADMITTED
    prompt = ready(queue, 10)
    assert compute(queue) == [(prompt, 10)]
    assert waiting.num_done == admitted.num_done == 0


def test_reused_tokens_are_not_computed() -> None:
    queue = PrefillQueue(100)
    prompt = ready(queue, 80)
    prompt.num_done = 64
    assert compute(queue) == [(prompt, 16)]


def test_a_prompt_whose_prefix_arrives_computes_four_chunks_at_once_if_no_other_is_queued() -> None:
    queue = PrefillQueue(10)
    prompt = queue.add(100, None, 0.0)
    queue.ready(prompt, 20, prefix_arrives=True)
    assert queue.plan() == [(prompt, 40)]
    other = queue.add(100, None, 0.0)
    assert queue.plan() == [(prompt, 10)]
    queue.remove(other)
    prompt.prefix_arrives = False  # the pass has ended
    assert queue.plan() == [(prompt, 10)]


def test_prompts_are_admitted_in_order_while_the_next_passes_have_room() -> None:
    queue = PrefillQueue(100)
    first, second, third = (queue.add(150, None, 0.0) for _ in range(3))
    for prompt in (first, second):
        assert queue.next_to_admit() is prompt
        prompt.state = PromptState.ADMITTED
    assert queue.next_to_admit() is None
    urgent = queue.add(10, 1.0, 0.0)
    assert queue.next_to_admit() is urgent  # nothing is before it
    urgent.state = PromptState.ADMITTED
    assert queue.next_to_admit() is None
    first.num_done = 149
    assert queue.next_to_admit() is third


def test_a_small_prompt_goes_past_one_that_waits_for_its_memory() -> None:
    queue = PrefillQueue(100)
    large = queue.add(5000, None, 0.0, flow=Flow("a", ""))
    large.state = PromptState.ADMITTED
    queue.add(10, None, 0.0, flow=Flow("a", ""))
    assert queue.next_to_admit(large) is None
    small = queue.add(10, None, 0.0, flow=Flow("b", ""))
    assert queue.next_to_admit(large) is small
    small.state = PromptState.ADMITTED
    assert queue.next_to_admit(large) is None


@pytest.mark.parametrize(("num_tokens", "num_reusable"), [(101, 0), (101, 96)])
def test_a_prompt_that_takes_much_memory_goes_past_none(num_tokens: int, num_reusable: int) -> None:
    queue = PrefillQueue(100)
    large = queue.add(5000, None, 0.0, flow=Flow("a", ""))
    large.state = PromptState.ADMITTED
    queue.add(num_tokens, None, 0.0, flow=Flow("b", ""), num_reusable=num_reusable)
    assert queue.next_to_admit(large) is None


def test_removed_prompt_is_neither_admitted_nor_computed() -> None:
    queue = PrefillQueue(100)
    prompt = ready(queue, 10)
    queue.remove(prompt)
    queue.remove(prompt)
    assert queue.plan() == []
    assert queue.next_to_admit() is None


@pytest.mark.parametrize("seed", range(20))
def test_nobody_starves_however_many_urgent_prompts_come(seed: int) -> None:
    """Work comes as fast as it is done, all of it more urgent; a patient prompt has its turn all the same."""
    rng = random.Random(seed)
    queue, now_s = PrefillQueue(100), 0.0
    patient = ready(queue, 250)
    while patient.num_left:
        left = 100
        while left > 0:
            num_tokens = min(rng.randrange(1, 60), left)
            ready(queue, num_tokens, rng.random() * 2, now_s)
            left -= num_tokens
        assert sum(num_tokens for _, num_tokens in compute(queue)) == 100
        now_s += 0.5
        assert now_s <= NO_DEADLINE_S + 10.0


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_computed_once_in_full_passes(seed: int) -> None:
    rng = random.Random(seed)
    queue = PrefillQueue(rng.randrange(1, 64))
    prompts = [ready(queue, rng.randrange(1, 90), rng.choice((None, 1.0, 3.0))) for _ in range(12)]
    sizes = []
    while shares := compute(queue):
        sizes.append(sum(num_tokens for _, num_tokens in shares))
    assert [prompt.num_left for prompt in prompts] == [0] * 12
    assert len(set(sizes[:-1])) <= 1  # all but the last are full


def test_priority_goes_before_deadlines() -> None:
    queue = PrefillQueue(100)
    later, urgent = queue.add(100, 0.0, 0.0, priority=1), queue.add(100, 0.1, 0.0)
    first = queue.add(100, None, 5.0, priority=-1)
    for prompt in (later, urgent, first):
        queue.ready(prompt, 0)
    assert [compute(queue)[0][0] for _ in range(3)] == [first, urgent, later]


def test_shares_end_with_whole_blocks_but_for_ends_of_prompts() -> None:
    queue = PrefillQueue(27, multiple=8)
    first, second, third = (queue.add(num_tokens, None, 0) for num_tokens in (44, 13, 3))
    for prompt in (first, second, third):
        queue.ready(prompt, 0)
    assert [(share.prompt, share.num_tokens) for share in queue.plan()] == [(first, 24)]
    first.num_done = 24
    assert [(share.prompt, share.num_tokens) for share in queue.plan()] == [(first, 20), (third, 3)]


# -- equal parts ------------------------------------------------------------------------------------


def test_a_short_prompt_waits_for_no_long_ones_of_another_tenant() -> None:
    queue = PrefillQueue(100, saturating_tokens=1)
    long = [ready(queue, 700, tenant="a") for _ in range(3)]
    assert [compute(queue)[0] for _ in range(9)] == [(long[0], 100)] * 7 + [(long[1], 100)] * 2
    short = ready(queue, 20, now_s=60.0, tenant="b")
    assert compute(queue) == [(short, 20)]
    assert compute(queue) == [(long[1], 100)]


def test_prompts_of_an_answer_count_as_if_they_came_one_after_the_other() -> None:
    queue = PrefillQueue(100, saturating_tokens=1)
    choices = [ready(queue, 100, answer_id="n=5") for _ in range(5)]
    assert [compute(queue)[0][0] for _ in range(2)] == choices[:2]
    singles = [ready(queue, 100, answer_id=str(index)) for index in range(2)]
    assert [compute(queue)[0][0] for _ in range(5)] == [choices[2], *singles, *choices[3:]]


def test_prompts_of_equal_length_of_many_tenants_go_one_after_the_other() -> None:
    """Side by side all of them would end when the last one does."""
    queue = PrefillQueue(100)
    prompts = [ready(queue, 300, tenant=str(index)) for index in range(4)]
    computed = [compute(queue)[0][0] for _ in range(12)]
    assert computed == [prompt for prompt in prompts for _ in range(3)]


def test_two_tenants_with_more_than_is_computed_have_equal_parts() -> None:
    queue, rng = PrefillQueue(100), random.Random(5)
    had = {"a": 0, "b": 0}
    tenant_of = {ready(queue, rng.randrange(1, 300), tenant="a"): "a" for _ in range(80)}
    tenant_of |= {ready(queue, rng.randrange(1, 50), tenant="b"): "b" for _ in range(400)}
    for _ in range(120):
        for prompt, num_tokens in compute(queue):
            had[tenant_of[prompt]] += num_tokens
    assert sum(had.values()) == 12_000
    assert abs(had["a"] - had["b"]) <= 600


def test_a_long_prompt_has_its_part_however_many_short_ones_of_others_come() -> None:
    queue, num_passes = PrefillQueue(100, saturating_tokens=1), 0
    long = ready(queue, 1000, tenant="a")
    while long.num_left:
        ready(queue, 50, tenant="b")
        ready(queue, 50, tenant="b")
        compute(queue)
        num_passes += 1
        assert num_passes <= 32  # 10 of its own, and twice as many of 50 tokens


def test_one_that_had_nothing_to_do_has_saved_up_nothing() -> None:
    queue = PrefillQueue(100)
    ready(queue, 100, tenant="b")
    heavy = [ready(queue, 100, tenant="a") for _ in range(20)]
    for _ in range(11):
        compute(queue)
    back = [ready(queue, 100, tenant="b") for _ in range(4)]
    order = [compute(queue)[0][0] for _ in range(8)]
    assert [prompt in back for prompt in order[:6]].count(True) <= 4
    assert [prompt in heavy for prompt in order].count(True) >= 4


def test_what_a_tenant_with_much_to_compute_has_next_shares_no_pass_with_a_short_prompt() -> None:
    queue = PrefillQueue(100)
    long = ready(queue, 300, tenant="a")
    assert compute(queue) == [(long, 100)]
    short, other = ready(queue, 16, tenant="b"), ready(queue, 20, tenant="c")
    assert compute(queue) == [(short, 16), (other, 20)]
    assert compute(queue) == [(long, 100)]


def test_a_short_prompt_cuts_into_the_pass_of_another_tenant() -> None:
    queue = PrefillQueue(100)
    long = ready(queue, 300, tenant="a")
    running = [share.prompt for share in queue.plan()]
    assert running == [long]
    assert queue.plan_cut_in(running) == []
    own = ready(queue, 16, tenant="a")
    assert queue.plan_cut_in(running) == []
    short = ready(queue, 16, tenant="b")
    assert queue.plan_cut_in(running) == [(short, 16)]
    queue.remove(short)
    assert queue.plan_cut_in(running) == []
    queue.remove(long)
    assert compute(queue) == [(own, 16)]


def test_what_is_more_than_a_pass_cuts_into_none() -> None:
    """Of a tenant with many prompts, or a longer one: such a pass would take long itself."""
    queue = PrefillQueue(1000, saturating_tokens=100)
    running = [ready(queue, 3000, tenant="a")]
    queue.plan()
    for _ in range(11):
        ready(queue, 10, tenant="b")
    assert queue.plan_cut_in(running) == []
    ready(queue, 101, tenant="c")
    assert queue.plan_cut_in(running) == []


@pytest.mark.parametrize("is_alone", ["running", "new"])
def test_a_prompt_that_is_to_be_alone_neither_cuts_in_nor_lets_in(is_alone: str) -> None:
    queue = PrefillQueue(100)
    long = queue.add(300, None, 0.0, flow=Flow("a", ""), is_alone=is_alone == "running")
    queue.ready(long, 0)
    running = [share.prompt for share in queue.plan()]
    short = queue.add(16, None, 0.0, flow=Flow("b", ""), is_alone=is_alone == "new")
    queue.ready(short, 0)
    assert queue.plan_cut_in(running) == []


def test_a_later_deadline_does_not_cut_in() -> None:
    queue = PrefillQueue(100)
    ready(queue, 300, 1.0, tenant="a")
    running = [share.prompt for share in queue.plan()]
    ready(queue, 16, 2.0, tenant="b")
    assert queue.plan_cut_in(running) == []
    due = ready(queue, 16, 0.5, tenant="c")
    assert queue.plan_cut_in(running) == [(due, 16)]


def test_prompts_that_cut_in_again_and_again_have_no_more_than_their_part() -> None:
    queue = PrefillQueue(100)
    long, num_short = ready(queue, 2000, tenant="a"), 0
    while long.num_left:
        running = [share.prompt for share in queue.plan()]
        assert running == [long]
        for _ in range(5):
            short = ready(queue, 60, tenant="b")
            num_short += bool(queue.plan_cut_in(running))
            queue.remove(short)
        long.num_done += 100
    assert 2000 / 60 <= num_short <= (2000 + 100) / 60 + 1


def test_tokens_that_are_expected_to_be_reused_do_not_count() -> None:
    queue = PrefillQueue(100, saturating_tokens=1)
    long = ready(queue, 700, tenant="a")
    compute(queue)
    history = queue.add(2000, None, 0.0, flow=Flow("b", "x"), num_reusable=1980)
    assert queue.next_to_admit() is history
    queue.ready(history, 1980)
    assert [compute(queue)[0] for _ in range(2)] == [(history, 20), (long, 100)]


def test_deadlines_go_before_equal_parts() -> None:
    queue = PrefillQueue(100)
    due = [ready(queue, 100, NO_DEADLINE_S - 1, tenant="a") for _ in range(3)]
    other = ready(queue, 10, NO_DEADLINE_S, tenant="b")
    patient = [ready(queue, 100, tenant="a") for _ in range(2)]
    last = ready(queue, 10, tenant="c")
    order = []
    while shares := compute(queue):
        order += [prompt for prompt, _ in shares if not prompt.num_left]
    assert order == [*due, other, last, *patient]


def test_nothing_is_remembered_once_all_is_computed() -> None:
    queue = PrefillQueue(100)
    ready(queue, 500, tenant="a")
    while compute(queue):
        pass
    first, second = ready(queue, 100, tenant="a"), ready(queue, 100, tenant="b")
    assert [compute(queue)[0][0] for _ in range(2)] == [first, second]


# -- prefixes that a prompt before computes -----------------------------------------------------------------

BLOCK = 64
"""tokens of a block: a prompt waits for two"""


def keys(*blocks: int) -> list[BlockKey]:
    """Keys of a prompt whose blocks have these tokens; `(1, 2)` and `(1, 2, 3)` have two in common."""
    return [bytes(blocks[: number + 1]).ljust(16) for number in range(len(blocks))]


def waiting(queue: PrefillQueue, block_keys: Sequence[BlockKey], priority: int = 0) -> QueuedPrompt:
    num_tokens = BLOCK * len(block_keys) + 1
    return queue.add(num_tokens, None, 0.0, priority, block_keys=block_keys)


def admitted(queue: PrefillQueue) -> QueuedPrompt | None:
    """The next prompt, which gets its memory at once."""
    prompt = queue.next_to_admit()
    if prompt is not None:
        prompt.state = PromptState.ADMITTED
    return prompt


def test_prompt_waits_until_the_blocks_of_one_before_it_are_stored() -> None:
    queue = PrefillQueue(1000, block_size=BLOCK)
    first, second = waiting(queue, keys(1, 2, 3)), waiting(queue, keys(1, 2, 4))
    assert admitted(queue) is first
    assert admitted(queue) is None
    queue.ready(first, 0)
    assert compute_all(queue) == [first]
    assert admitted(queue) is None
    queue.remove(first)  # stored
    assert admitted(queue) is second


def test_nothing_waits_for_a_prompt_that_was_aborted_in_its_last_pass() -> None:
    queue = PrefillQueue(1000, block_size=BLOCK)
    first = waiting(queue, keys(1, 2))
    assert admitted(queue) is first
    queue.ready(first, 0)
    assert [prompt for prompt, _ in queue.plan()] == [first]
    queue.remove(first)  # aborted, while the pass runs
    queue.computed(first)
    again = waiting(queue, keys(1, 2))
    assert admitted(queue) is again


def compute_all(queue: PrefillQueue) -> list[QueuedPrompt]:
    """Computes what is READY to its end; stores none of it."""
    ended = []
    while shares := queue.plan():
        for prompt, num_tokens in shares:
            prompt.num_done += num_tokens
            if not prompt.num_left:
                queue.computed(prompt)
                ended.append(prompt)
    return ended


def test_prompts_behind_one_that_waits_do_not_wait() -> None:
    queue = PrefillQueue(1000, block_size=BLOCK)
    first, _, other = waiting(queue, keys(1, 2)), waiting(queue, keys(1, 2)), waiting(queue, keys(5, 6))
    assert [admitted(queue), admitted(queue), admitted(queue)] == [first, other, None]


@pytest.mark.parametrize("num_held", [0, 1])
def test_prompt_does_not_wait_for_fewer_tokens_than_a_pass_costs(num_held: int) -> None:
    queue = PrefillQueue(1000, block_size=BLOCK)
    shared = (1, 2)[: 1 + num_held]
    first, second = waiting(queue, keys(*shared, 3, 4)), waiting(queue, keys(*shared, 5, 6))
    assert admitted(queue) is first
    first.num_held_blocks = num_held
    assert admitted(queue) is second


def test_prompt_of_a_higher_priority_computes_the_prefix_itself() -> None:
    queue = PrefillQueue(1000, block_size=BLOCK)
    first = waiting(queue, keys(1, 2, 3))
    assert admitted(queue) is first
    urgent = waiting(queue, keys(1, 2, 3), priority=-1)
    assert admitted(queue) is urgent


def test_prompt_waits_anew_for_one_whose_reuse_has_failed() -> None:
    queue = PrefillQueue(1000, block_size=BLOCK)
    first, _ = waiting(queue, keys(1, 2, 3)), waiting(queue, keys(1, 2, 3), priority=1)
    assert admitted(queue) is first
    queue.ready(first, 64)
    assert compute_all(queue) == [first]
    queue.ready(first, 0)
    assert admitted(queue) is None
    assert compute_all(queue) == [first]
    queue.remove(first)
    assert admitted(queue) is not None


steps = st.lists(
    st.one_of(
        st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(0, 1)),  # a prompt comes
        st.integers(0, 20),  # one is aborted
        st.none(),  # what can go on goes on
    ),
    max_size=25,
)


@settings(max_examples=num_examples(200))
@given(steps)
def test_prompts_that_wait_for_one_another_all_come_to_their_end(
    steps: list[tuple[list[int], int] | int | None],
) -> None:
    queue, here = PrefillQueue(150, block_size=BLOCK), list[QueuedPrompt]()

    def go_on() -> bool:
        """One step of the runner; whether there was any."""
        prompt = admitted(queue)
        if prompt is not None:
            queue.ready(prompt, 0)
        ended = compute_all(queue)
        for computed in ended:
            queue.remove(computed)
            here.remove(computed)
        return prompt is not None or bool(ended)

    for step in steps:
        if step is None:
            go_on()
        elif isinstance(step, int):
            if here:
                queue.remove(here.pop(step % len(here)))
        else:
            here.append(waiting(queue, keys(*step[0]), step[1]))
    while here:
        assert go_on()
