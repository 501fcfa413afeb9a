"""Running sequences whose first pages go to a helper, and back."""

from fractions import Fraction
from unittest.mock import Mock

import pytest

from tests.workers.decode.batching.test_batch import PAGE_SIZE, Batch
from workers.decode.batching.division import begin_division, begin_reunion, drop_division, end_division
from workers.decode.sequence import Sequence, SequenceState
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.helped_parts import HostedPages
from workers.engine.spec import ModelSpec

NUM_OWN, NUM_HOSTED, NUM_TOKENS = 24, 20, 46
"""A sequence of 12 pages, 11 of which are full."""


@pytest.fixture
def spec() -> ModelSpec:
    return ModelSpec("LlamaForCausalLM", 32, 16, 16, 2, 2, 1, 8, 4096)


def divided(
    spec: ModelSpec, share: Fraction = Fraction(1, 2), num_own: int = NUM_OWN
) -> tuple[Batch, DeviceKVCache, Sequence]:
    """A batch with one running sequence, when a helper's pages have come."""
    batch = Batch(spec, num_own)
    sequence = batch.joined(NUM_TOKENS)
    have_helper(batch.kv, share, NUM_HOSTED)
    return batch, batch.kv, sequence


def have_helper(kv: DeviceKVCache, share: Fraction, num_hosted: int) -> Mock:
    """Give the cache a helper's pages. Returns the owner's end of the exchange."""
    owner = Mock(is_closed=False)
    pages = HostedPages(share, kv.new_layers(num_hosted, 1), owner, None)
    kv.rearrange([kv.layer(layer) for layer in kv.layers], pages)
    return owner


def test_full_pages_change_their_numbers_when_they_have_been_copied(spec: ModelSpec) -> None:
    batch, kv, sequence = divided(spec)
    before = list(sequence.pages)
    [division] = divisions = begin_division(batch.batch.running, batch.kv)
    assert sequence.pages == before
    assert division.replaced == before[:6]
    there = list(division.pages)
    end_division(divisions, batch.kv.pages)
    assert sequence.pages == there + before[6:]
    assert (kv.pages.num_hosted_of(sequence.pages), kv.pages.num_free_for(0)) == (6, NUM_OWN - 6)
    assert begin_division(batch.batch.running, batch.kv) == []


def test_the_page_that_is_being_written_stays(spec: ModelSpec) -> None:
    batch, kv, sequence = divided(spec, Fraction(99, 100))
    end_division(begin_division(batch.batch.running, batch.kv), batch.kv.pages)
    assert kv.pages.num_hosted_of(sequence.pages) == len(sequence.pages) - 1


def test_the_pages_that_one_sequence_frees_are_room_for_all(spec: ModelSpec) -> None:
    batch = Batch(spec, 61)
    first, *_ = [batch.joined(78) for _ in range(3)]  # 20 pages each, 19 of them full
    have_helper(batch.kv, Fraction(1, 100), 60)
    [division] = begin_division(batch.batch.running, batch.kv)
    assert division.sequence is first
    assert len(division.pages) == 19


@pytest.mark.parametrize("is_left", [False, True], ids=["stored", "left"])
def test_a_sequence_that_is_stored_or_has_left_meanwhile_keeps_its_pages(
    spec: ModelSpec, *, is_left: bool
) -> None:
    batch, kv, sequence = divided(spec)
    before, divisions = list(sequence.pages), begin_division(batch.batch.running, batch.kv)
    if is_left:
        batch.batch.leave(sequence)
    else:
        sequence.num_stores = 1
    end_division(divisions, batch.kv.pages)
    assert sequence.pages == before
    assert kv.pages.num_free == NUM_OWN + NUM_HOSTED - len(before)


def test_sequences_are_divided_again_for_as_many_pages_as_there_are_sequences(spec: ModelSpec) -> None:
    batch, kv, sequence = divided(spec, num_own=25)
    others = [batch.joined(1) for _ in range(6)]
    assert kv.pages.num_free_for(0) == 7  # one for each
    assert begin_division(batch.batch.running, batch.kv, again=True) == []
    assert kv.pages.num_free == 25 + NUM_HOSTED - len(sequence.pages) - len(others)
    batch.end(others[0])
    [division] = begin_division(batch.batch.running, batch.kv, again=True)
    assert len(division.pages) == 6


def test_few_pages_go_where_not_every_sequence_has_room_to_grow_into_one(spec: ModelSpec) -> None:
    batch, kv, sequence = divided(spec)
    others = [batch.joined(PAGE_SIZE - 1) for _ in range(6)]
    kv.pages.allocate(kv.pages.num_free_for(0))
    kv.pages.allocate_hosted(NUM_HOSTED - 6)
    end_division(begin_division(batch.batch.running, batch.kv, again=True), batch.kv.pages)
    for _ in range(2):  # each of the others needs a page
        assert batch.iterate() == [sequence, *others]
    assert kv.pages.num_free_for(0) == 0


@pytest.mark.parametrize(("num", "num_pages"), [(7, 96), (20, 290), (32, 520)])
def test_no_sequence_waits_for_a_page_while_the_helper_has_some(
    spec: ModelSpec, num: int, num_pages: int
) -> None:
    batch = Batch(spec, num_pages, max_batch=num)
    running = [batch.joined(30 + 11 * index % 17, 1000) for index in range(num)]
    have_helper(batch.kv, Fraction(1, 2), num_pages)
    end_division(begin_division(batch.batch.running, batch.kv), batch.kv.pages)
    while batch.iterate() == running:
        end_division(begin_division(batch.batch.running, batch.kv, again=True), batch.kv.pages)
    assert batch.kv.pages.num_free - batch.kv.pages.num_free_for(0) < 4  # fewer than are worth a division


def test_pages_come_back_to_free_pages(spec: ModelSpec) -> None:
    batch, kv, sequence = divided(spec)
    end_division(begin_division(batch.batch.running, kv), kv.pages)
    there, here = sequence.pages[:6], sequence.pages[6:]
    [division] = divisions = begin_reunion(batch.batch.running, kv)
    assert division.replaced == there
    own = list(division.pages)
    end_division(divisions, kv.pages)
    assert sequence.pages == own + here
    assert (kv.pages.used(NUM_OWN), kv.pages.num_free_for(0)) == ([], NUM_OWN - len(own + here))
    assert begin_reunion(batch.batch.running, kv) == []


def test_those_with_the_fewest_pages_come_back_where_there_is_not_room_for_all(spec: ModelSpec) -> None:
    batch = Batch(spec, 61)
    long, short, *_ = [batch.joined(num_tokens) for num_tokens in (78, 38, 2)]
    have_helper(kv := batch.kv, Fraction(1, 2), 60)
    end_division(begin_division(batch.batch.running, kv), kv.pages)
    assert [kv.pages.num_hosted_of(one.pages) for one in (long, short)] == [10, 5]
    kv.pages.allocate(kv.pages.num_free_for(0) - 15)  # three pages are kept for three sequences
    assert [one.sequence for one in begin_reunion(batch.batch.running, kv)] == [short]


def test_a_division_that_is_not_worth_a_pause_takes_no_page(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, kv, _ = divided(spec, num_own=25)
    for _ in range(6):
        batch.joined(1)
    allocate = Mock(wraps=kv.pages.allocate_hosted)
    monkeypatch.setattr(kv.pages, "allocate_hosted", allocate)
    assert begin_division(batch.batch.running, batch.kv, again=True) == []
    assert not allocate.call_count


def test_no_more_pages_go_than_the_helper_has(spec: ModelSpec) -> None:
    batch = Batch(spec, NUM_OWN)
    first, second = batch.joined(NUM_TOKENS), batch.joined(NUM_TOKENS - PAGE_SIZE)
    have_helper(batch.kv, Fraction(1, 2), 10)
    divisions = begin_division(batch.batch.running, batch.kv)
    assert [(one.sequence, len(one.pages)) for one in divisions] == [(first, 6), (second, 4)]
    assert batch.kv.pages.num_free == batch.kv.pages.num_free_for(0)


def test_nothing_is_copied_of_a_sequence_that_is_being_stored(spec: ModelSpec) -> None:
    batch, _, sequence = divided(spec)
    sequence.num_stores = 1
    assert begin_division(batch.batch.running, batch.kv) == []
    sequence.num_stores = 0
    assert begin_division(batch.batch.running, batch.kv)


def test_a_division_that_is_given_up_leaves_nothing_behind(spec: ModelSpec) -> None:
    batch, kv, sequence = divided(spec)
    before, divisions = list(sequence.pages), begin_division(batch.batch.running, batch.kv)
    drop_division(divisions, batch.kv.pages)
    assert (sequence.pages, kv.pages.num_free) == (before, NUM_OWN + NUM_HOSTED - len(before))


def test_an_inlined_prompt_that_does_not_fit_here_is_not_told_of_pages_at_the_helper(spec: ModelSpec) -> None:
    batch, _, running = divided(spec)
    batch.end(running)
    prompt = entered_prompt(batch, NUM_OWN + 1)
    batch.batch.plan()
    assert str(prompt.error) == f"it needs {NUM_OWN + 1} device pages now, and there are {NUM_OWN}"


def full(spec: ModelSpec) -> tuple[Batch, Sequence, Sequence]:
    """A batch that has 3 pages here and 9 at the helper left. It runs a prompt of 20 pages here, and a newer
    sequence of one page here and 11 at the helper. Both are of one answer."""
    batch = Batch(spec, NUM_OWN)
    have_helper(batch.kv, Fraction(99, 100), NUM_HOSTED)
    prompt = entered_prompt(batch, 20, answer_id="one")
    batch.batch.plan()
    batch.batch.join(prompt)
    return batch, prompt, batch.joined(NUM_TOKENS, answer_id="one")


def entered_prompt(batch: Batch, num_pages: int, **flow: str) -> Sequence:
    """A prompt that is computed here, so that no page can be at the helper."""
    prompt = batch.sequence(PAGE_SIZE * num_pages, **flow)
    prompt.tokens.pop()  # the first token is drawn here
    batch.batch.enter(prompt)
    return prompt


def test_nobody_is_preempted_for_a_prompt_by_pages_that_the_helper_has(spec: ModelSpec) -> None:
    batch, prompt, divided = full(spec)
    other = entered_prompt(batch, 4, tenant="other")
    batch.batch.plan()
    states = [sequence.state for sequence in (prompt, divided, other)]
    assert states == [SequenceState.RUNNING, SequenceState.RUNNING, SequenceState.WAITING]


def test_pages_at_the_helper_come_free_for_a_sequence_that_can_have_them(spec: ModelSpec) -> None:
    batch, prompt, divided = full(spec)
    other = batch.entered(NUM_TOKENS + PAGE_SIZE, tenant="other")
    batch.batch.plan()
    assert (prompt.state, divided.state) == (SequenceState.RUNNING, SequenceState.LEAVING)
    batch.batch.free(divided)
    batch.batch.plan()
    assert other.state is SequenceState.LOADING


def test_a_sequence_does_not_wait_to_grow_into_pages_that_the_helper_has(spec: ModelSpec) -> None:
    batch, prompt, divided = full(spec)
    newest = batch.joined(PAGE_SIZE)
    batch.kv.pages.allocate(batch.kv.pages.num_free_for(0))
    batch.batch.leave(divided)  # which frees a page here, for one of both
    for sequence in (prompt, newest):
        sequence.tokens += [1] * PAGE_SIZE
    batch.batch.plan()
    assert (prompt.state, newest.state) == (SequenceState.RUNNING, SequenceState.LEAVING)


def test_the_pages_of_a_sequence_are_counted_once_for_a_claim(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(spec, NUM_OWN, max_batch=16)
    have_helper(batch.kv, Fraction(1, 2), NUM_HOSTED)
    running = [batch.joined(2 * PAGE_SIZE, tenant="one") for _ in range(13)]
    count = Mock(wraps=batch.kv.pages.num_hosted_of)
    monkeypatch.setattr(batch.kv.pages, "num_hosted_of", count)
    batch.entered(NUM_TOKENS, tenant="other")
    batch.batch.plan()
    preempted = [sequence for sequence in reversed(running) if sequence.state is SequenceState.LEAVING]
    counted = [pages for ((pages, *_), _) in count.call_args_list if pages]
    assert len(preempted) > 2
    assert counted == [sequence.pages for sequence in preempted]
