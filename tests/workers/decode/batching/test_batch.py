"""Admission, growth and preemption, without a device that computes."""

import itertools

import pytest
import torch

from mooncake.messages.requests import Ref, Request, SamplingParams
from tests.tiny_models import tiny_model
from workers.decode.batching.batch import DecodeBatch
from workers.decode.sequence import Sequence, SequenceState
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.spec import ModelSpec
from workers.errors import NoRoomError
from workers.execution.model_spec import model_spec

PAGE_SIZE = 4


class Batch:
    """A `DecodeBatch` whose iterations end at once."""

    def __init__(self, spec: ModelSpec, num_pages: int, max_batch: int = 8) -> None:
        self.kv = DeviceKVCache(spec, range(1), num_pages, PAGE_SIZE, torch.float32)
        self.batch = DecodeBatch(self.kv, max_batch)
        self._numbers = itertools.count()

    def sequence(
        self, num_tokens: int, max_tokens: int = 100, priority: int = 0, tenant: str = "", answer_id: str = ""
    ) -> Sequence:
        """With its first token: `num_tokens` of KVCache."""
        number = next(self._numbers)
        request = Request(
            str(number),
            [1] * num_tokens,
            [],
            SamplingParams(max_tokens),
            "front",
            priority=priority,
            tenant=tenant,
            answer_id=answer_id,
        )
        return Sequence(number, Ref(1, str(number), 1), request, [1] * (num_tokens + 1))

    def entered(self, num_tokens: int, max_tokens: int = 100, priority: int = 0, **flow: str) -> Sequence:
        sequence = self.sequence(num_tokens, max_tokens, priority, **flow)
        self.batch.enter(sequence)
        return sequence

    def joined(self, num_tokens: int, max_tokens: int = 100, priority: int = 0, **flow: str) -> Sequence:
        sequence = self.entered(num_tokens, max_tokens, priority, **flow)
        self.batch.plan()
        assert sequence.state is SequenceState.LOADING
        self.batch.join(sequence)
        return sequence

    def iterate(self) -> list[Sequence]:
        ready = self.batch.plan()
        for sequence in ready:
            assert len(sequence.pages) == -(-len(sequence.tokens) // PAGE_SIZE)
            sequence.tokens.append(1)
        return ready

    def settled(self, *sequences: Sequence) -> list[SequenceState]:
        """Plans, loads and parks until nothing changes: the states of these."""
        states: list[SequenceState] = []
        while states != (states := [sequence.state for sequence in sequences]):
            self.batch.plan()
            self.batch.release_left()
            for sequence in sequences:
                if sequence.state is SequenceState.LOADING:
                    self.batch.join(sequence)
                if sequence.state is SequenceState.LEAVING:
                    self.batch.free(sequence)
                    self.batch.enter(sequence)
        return states

    def end(self, sequence: Sequence) -> None:
        self.batch.leave(sequence)
        self.batch.free(sequence)

    def grown(self, *sequences: Sequence) -> list[Sequence]:
        """Iterates until not all of these take part."""
        while set(ready := self.iterate()) >= set(sequences):
            pass
        return ready


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return model_spec(tiny_model("smollm2").config.to_dict())


def test_takes_part_from_the_iteration_after_its_load_on(spec: ModelSpec) -> None:
    batch = Batch(spec, 10)
    first = batch.joined(5)
    second = batch.entered(5)
    assert batch.iterate() == [first]
    assert second.admitted.is_set()
    assert batch.iterate() == [first]
    batch.batch.join(second)
    assert batch.iterate() == [first, second]


def test_admits_in_order_even_if_a_later_one_would_fit(spec: ModelSpec) -> None:
    batch = Batch(spec, 6)
    batch.joined(7)
    large, small = batch.entered(15), batch.entered(1)
    batch.iterate()
    assert not large.admitted.is_set()
    assert not small.admitted.is_set()


def test_admits_no_more_than_max_batch_those_that_load_included(spec: ModelSpec) -> None:
    batch = Batch(spec, 20, max_batch=2)
    batch.joined(1)
    second, third = batch.entered(1), batch.entered(1)
    batch.batch.plan()
    assert (second.state, third.state) == (SequenceState.LOADING, SequenceState.WAITING)
    batch.batch.leave(second)
    batch.batch.free(second)
    batch.batch.plan()
    assert third.state is SequenceState.LOADING


def test_newest_gives_way_and_comes_back_before_later_ones(spec: ModelSpec) -> None:
    batch = Batch(spec, 6)
    old, new = batch.joined(7), batch.joined(7)
    later = batch.entered(5)
    assert batch.grown(old, new) == []  # none of both has a page until the other's are free
    assert new.state is SequenceState.LEAVING
    batch.batch.release_left()
    assert new.left.is_set()
    batch.batch.free(new)
    assert batch.iterate() == [old]
    batch.batch.enter(new)
    batch.batch.leave(old)
    batch.batch.free(old)
    batch.iterate()
    assert new.state is SequenceState.LOADING
    assert (new.left.is_set(), later.state) == (False, SequenceState.WAITING)


def test_lower_priority_numbers_are_admitted_first_and_give_way_last(spec: ModelSpec) -> None:
    batch = Batch(spec, 6)
    old, new = batch.joined(7, priority=1), batch.joined(7)
    later, sooner = batch.entered(5), batch.entered(5, priority=-1)
    assert batch.grown(old, new) == []
    assert old.state is SequenceState.LEAVING
    batch.batch.release_left()
    batch.batch.free(old)
    batch.batch.enter(old)
    batch.batch.leave(new)
    batch.batch.free(new)
    batch.batch.plan()
    states = [sequence.state for sequence in (sooner, later, old)]
    assert states == [SequenceState.LOADING, SequenceState.LOADING, SequenceState.WAITING]


def test_a_minute_makes_up_for_a_step_of_priority(spec: ModelSpec) -> None:
    batch = Batch(spec, 8, max_batch=1)
    running = batch.joined(1)
    waiting = [batch.sequence(1, priority=priority) for priority in (1, 0, 0)]
    for sequence, received_s in zip(waiting, (100.0, 159.0, 161.0), strict=True):
        sequence.received_s = received_s
        batch.batch.enter(sequence)
    order: list[int] = []
    while len(order) < len(waiting):
        batch.batch.leave(running)
        batch.batch.free(running)
        batch.batch.plan()
        (running,) = [sequence for sequence in waiting if sequence.state is SequenceState.LOADING]
        batch.batch.join(running)
        order.append(waiting.index(running))
    assert order == [1, 0, 2]


def test_waits_for_pages_that_are_about_to_come_free_instead_of_preempting(spec: ModelSpec) -> None:
    batch = Batch(spec, 7)
    old, new = batch.joined(11), batch.joined(11, max_tokens=3)
    batch.kv.pages.allocate(1)
    assert batch.iterate() == [old, new]
    new.in_flight_until = len(new.tokens)
    assert new.ends_in_flight
    assert batch.iterate() == []
    assert (old.state, new.state) == (SequenceState.RUNNING, SequenceState.RUNNING)


def test_pages_of_an_iteration_in_flight_are_kept(spec: ModelSpec) -> None:
    batch = Batch(spec, 6)
    sequence = batch.joined(5)
    sequence.in_flight_until = len(sequence.tokens)
    batch.batch.leave(sequence)
    batch.batch.release_left()
    assert not sequence.left.is_set()
    sequence.in_flight_until = None
    batch.batch.release_left()
    assert sequence.left.is_set()
    assert batch.kv.pages.num_free == 4
    batch.batch.free(sequence)
    assert batch.kv.pages.num_free == 6


def test_plans_a_page_for_a_token_that_is_not_known_yet(spec: ModelSpec) -> None:
    batch = Batch(spec, 6)
    sequence = batch.joined(6)  # the seventh token is known, the eighth in flight
    assert batch.batch.plan() == [sequence]
    sequence.in_flight_until = len(sequence.tokens)
    assert batch.batch.plan() == [sequence]
    assert len(sequence.pages) == 2
    sequence.tokens.append(1)
    sequence.in_flight_until = len(sequence.tokens)
    batch.batch.plan()
    assert len(sequence.pages) == 3


@pytest.mark.parametrize("num_tokens", [12, 11])
def test_what_never_fits_fails_instead_of_waiting(spec: ModelSpec, num_tokens: int) -> None:
    batch = Batch(spec, 3)
    sequence = batch.entered(num_tokens)
    batch.batch.plan()
    batch.batch.join(sequence)
    batch.grown(sequence)
    batch.batch.release_left()
    assert isinstance(sequence.error, NoRoomError)
    assert sequence.admitted.is_set()
    assert sequence.left.is_set()


# -- equal parts ------------------------------------------------------------------------------------

RUNNING, WAITING = SequenceState.RUNNING, SequenceState.WAITING


def test_a_tenant_with_all_slots_yields_one_to_another_tenant_and_gets_it_back(spec: ModelSpec) -> None:
    batch = Batch(spec, 20, max_batch=3)
    choices = [batch.entered(1, tenant="a", answer_id="n=6") for _ in range(6)]
    assert batch.settled(*choices) == [RUNNING] * 3 + [WAITING] * 3
    short = batch.entered(1, tenant="b")
    assert batch.settled(*choices, short) == [RUNNING] * 2 + [WAITING] * 4 + [RUNNING]
    batch.end(short)
    assert batch.settled(*choices) == [RUNNING] * 3 + [WAITING] * 3


def ending(batch: Batch, num: int, tenant: str = "a") -> list[Sequence]:
    """Sequences whose last token is being drawn."""
    sequences = [batch.joined(1, max_tokens=2, tenant=tenant) for _ in range(num)]
    for sequence in sequences:
        sequence.in_flight_until = len(sequence.tokens)
        assert sequence.ends_in_flight
    return sequences


def test_a_tenant_takes_the_slot_of_a_sequence_whose_last_token_is_being_drawn(spec: ModelSpec) -> None:
    batch = Batch(spec, 20, max_batch=4)
    ending(batch, 2)
    joined = [batch.joined(1, max_tokens=2, tenant="a") for _ in range(2)]
    own, other = batch.entered(1, tenant="a"), batch.entered(1, tenant="b")
    assert batch.batch.plan() == joined
    assert (other.state, own.state) == (SequenceState.LOADING, WAITING)
    batch.batch.join(other)
    assert batch.batch.plan() == [*joined, other], "the next iteration, and nobody is preempted for it"


def test_the_next_iteration_has_no_more_sequences_than_slots(spec: ModelSpec) -> None:
    batch = Batch(spec, 20, max_batch=2)
    lost = ending(batch, 2)
    others = [batch.entered(1, tenant=tenant) for tenant in ("b", "c", "d")]
    batch.batch.plan()
    assert [other.state for other in others] == [SequenceState.LOADING] * 2 + [WAITING]
    for other in others[:2]:
        batch.batch.join(other)
    for sequence in lost:
        sequence.in_flight_until = None  # the iteration was lost
    assert batch.batch.plan() == lost


def test_slots_that_nobody_else_wants_are_anybodys(spec: ModelSpec) -> None:
    batch = Batch(spec, 20, max_batch=4)
    short = batch.entered(1, tenant="b")
    choices = [batch.entered(1, tenant="a", answer_id="n=6") for _ in range(6)]
    assert batch.settled(short, *choices) == [RUNNING] * 4 + [WAITING] * 3


@pytest.mark.parametrize("second", [{"tenant": "b", "answer_id": "y"}, {"tenant": "a", "answer_id": "y"}])
def test_two_that_want_everything_have_half_and_nobody_swaps(spec: ModelSpec, second: dict[str, str]) -> None:
    batch = Batch(spec, 40, max_batch=5)
    first_ones = [batch.entered(1, tenant="a", answer_id="x") for _ in range(8)]
    batch.settled(*first_ones)
    second_ones = [batch.entered(1, **second) for _ in range(8)]
    everybody = first_ones + second_ones
    states = batch.settled(*everybody)
    assert (states[:8].count(RUNNING), states[8:].count(RUNNING)) == (3, 2)
    assert states[:3] == [RUNNING] * 3  # the newest have yielded
    assert batch.settled(*everybody) == states
    batch.end(everybody.pop(0))
    states = batch.settled(*everybody)
    assert (states[:7].count(RUNNING), states[7:].count(RUNNING)) in {(2, 3), (3, 2)}


def test_a_tenants_parts_do_not_depend_on_how_many_answers_it_wants(spec: ModelSpec) -> None:
    batch = Batch(spec, 40, max_batch=4)
    flood = [batch.entered(1, tenant="a") for _ in range(9)]
    batch.settled(*flood)
    other = [batch.entered(1, tenant="b", answer_id="n=3") for _ in range(3)]
    states = batch.settled(*flood, *other)
    assert (states[:9].count(RUNNING), states[9:].count(RUNNING)) == (2, 2)


def test_requests_of_one_tenant_are_first_come_first_served_unless_one_has_several_slots(
    spec: ModelSpec,
) -> None:
    batch = Batch(spec, 20, max_batch=2)
    singles = [batch.entered(1) for _ in range(4)]
    assert batch.settled(*singles) == [RUNNING] * 2 + [WAITING] * 2
    batch.end(singles.pop(0))
    assert batch.settled(*singles) == [RUNNING] * 2 + [WAITING]
    for single in singles:
        batch.end(single)
    choices = [batch.entered(1, answer_id="n=3") for _ in range(3)]
    assert batch.settled(*choices) == [RUNNING] * 2 + [WAITING]
    single = batch.entered(1)
    assert batch.settled(*choices, single) == [RUNNING, WAITING, WAITING, RUNNING]


def test_pages_count_as_slots_do(spec: ModelSpec) -> None:
    batch = Batch(spec, 10, max_batch=8)
    long = [batch.entered(15, tenant="a") for _ in range(2)]
    assert batch.settled(*long) == [RUNNING] * 2
    short = batch.entered(7, tenant="b")  # 2 pages, and one to grow
    assert batch.settled(*long, short) == [RUNNING, WAITING, RUNNING]
    batch.end(short)
    assert batch.settled(*long) == [RUNNING] * 2


def test_nobody_is_preempted_for_a_request_that_gets_no_room_all_the_same(spec: ModelSpec) -> None:
    batch = Batch(spec, 10, max_batch=8)
    long = [batch.entered(15, tenant="a") for _ in range(2)]
    batch.settled(*long)
    longer = batch.entered(31, tenant="b")
    assert batch.settled(*long, longer) == [RUNNING, RUNNING, WAITING]


def test_whoever_has_more_yields_its_pages_when_others_grow(spec: ModelSpec) -> None:
    batch = Batch(spec, 9, max_batch=8)
    long = [batch.joined(15, tenant="a"), batch.joined(11, tenant="a")]
    short = batch.joined(1, tenant="b")
    assert batch.grown(*long, short) == [long[0], short]  # the newest is not who yields
    assert long[1].state is SequenceState.LEAVING


def test_nobody_yields_to_a_higher_priority_number(spec: ModelSpec) -> None:
    batch = Batch(spec, 20, max_batch=2)
    urgent = [batch.entered(1, tenant="a", answer_id="n=3") for _ in range(2)]
    batch.settled(*urgent)
    patient = batch.entered(1, tenant="b", priority=1)
    assert batch.settled(*urgent, patient) == [RUNNING, RUNNING, WAITING]
    sooner = batch.entered(1, tenant="c")
    assert batch.settled(*urgent, patient, sooner) == [RUNNING, WAITING, WAITING, RUNNING]


# -- migration --------------------------------------------------------------------------------------


def prepared(batch: Batch, num_tokens: int, **flow: str) -> tuple[Sequence, bool]:
    sequence = batch.sequence(num_tokens - 1, **flow)
    return sequence, batch.batch.prepare(sequence)


def test_a_prepared_sequence_has_pages_for_its_next_token_and_takes_no_part(spec: ModelSpec) -> None:
    batch = Batch(spec, 10)
    running = batch.joined(5)
    sequence, is_there = prepared(batch, 9)
    assert (is_there, sequence.state, len(sequence.pages)) == (True, SequenceState.PREPARED, 3)
    assert batch.iterate() == [running]
    batch.batch.join(sequence)
    assert batch.iterate() == [running, sequence]


def test_a_prepared_sequence_grows(spec: ModelSpec) -> None:
    batch = Batch(spec, 6)
    batch.joined(1)
    sequence, _ = prepared(batch, 7)
    sequence.tokens += [1] * 4
    assert batch.batch.prepare(sequence)
    assert len(sequence.pages) == 3
    sequence.tokens += [1] * 8
    assert not batch.batch.prepare(sequence), "a page is left to grow"
    assert len(sequence.pages) == 3
    batch.end(sequence)
    assert batch.kv.pages.num_free == 5


def test_a_sequence_is_prepared_at_once_or_not_at_all(spec: ModelSpec) -> None:
    slots = Batch(spec, 20, max_batch=2)
    slots.joined(1)
    _, is_first = prepared(slots, 5)
    _, is_second = prepared(slots, 5)
    assert (is_first, is_second) == (True, False), "a prepared one has a slot"
    other = slots.entered(1)
    slots.batch.plan()
    assert other.state is SequenceState.WAITING
    pages = Batch(spec, 4)
    pages.joined(5)
    assert not prepared(pages, 4)[1], "two pages, and one to grow"
    assert prepared(pages, 3)[1]
    assert prepared(Batch(spec, 4), 15)[1], "nobody else may want to grow"


def test_sequences_that_wait_are_admitted_before_one_is_prepared(spec: ModelSpec) -> None:
    batch = Batch(spec, 7)
    batch.joined(7)
    entered = batch.entered(1)
    assert prepared(batch, 2)[1]
    assert entered.state is SequenceState.LOADING, "it had only not been planned yet"
    batch.entered(25)
    assert not prepared(batch, 1)[1]


def test_a_sequence_that_is_alone_waits_for_pages_while_one_is_prepared(spec: ModelSpec) -> None:
    batch = Batch(spec, 5)
    running = batch.joined(5)
    sequence, _ = prepared(batch, 7)
    batch.grown(running)
    for _ in range(3):
        assert batch.iterate() == []
    assert (running.state, running.error) == (SequenceState.RUNNING, None)
    assert sequence.state is SequenceState.PREPARED
    batch.end(sequence)
    assert batch.iterate() == [running]


def test_a_sequence_that_was_prepared_is_preempted_like_others(spec: ModelSpec) -> None:
    batch = Batch(spec, 5)
    running = batch.joined(5)
    sequence, _ = prepared(batch, 7)
    batch.batch.join(sequence)
    batch.grown(running, sequence)
    assert sequence.state is SequenceState.LEAVING


def test_a_prepared_sequence_counts_for_its_tenants_share(spec: ModelSpec) -> None:
    batch = Batch(spec, 40, max_batch=3)
    first, second = batch.joined(1, tenant="a"), batch.joined(1, tenant="b")
    sequence, _ = prepared(batch, 2, tenant="a")
    batch.entered(1, tenant="b")
    batch.batch.plan()
    assert (first.state, second.state) == (SequenceState.RUNNING, SequenceState.RUNNING)
    batch.entered(1, tenant="c")
    batch.batch.plan()
    assert (first.state, second.state) == (SequenceState.LEAVING, SequenceState.RUNNING)
    assert sequence.state is SequenceState.PREPARED


def test_a_page_that_was_another_sequences_meanwhile_is_another_full_page(spec: ModelSpec) -> None:
    batch = Batch(spec, num_pages=4)
    first = batch.joined(2 * PAGE_SIZE)
    before, pages = batch.batch.full_pages(), first.pages
    batch.batch.leave(first)
    batch.batch.free(first)
    second = batch.joined(2 * PAGE_SIZE)
    assert set(second.pages) & set(pages)
    batch.batch.leave(second)
    batch.batch.free(second)
    batch.batch.enter(first)
    assert batch.settled(first) == [SequenceState.RUNNING]
    assert first.pages == pages, "else this shows nothing"
    assert not batch.batch.full_pages() & before


def test_pages_without_kvcache_are_known_and_full_ones_of_all_that_stay(spec: ModelSpec) -> None:
    batch = Batch(spec, 20)
    running, leaving = batch.joined(9), batch.joined(8)
    batch.iterate()
    running.pages += batch.kv.pages.allocate(2)
    batch.batch.leave(leaving)
    prepared = batch.sequence(13)
    prepared.tokens, prepared.num_cached_tokens = list(prepared.request.token_ids), 12
    assert batch.batch.prepare(prepared)
    full = {full_page.page for full_page in batch.batch.full_pages()}
    assert full == {*running.pages[:2], *prepared.pages[:3]}
    assert batch.batch.unwritten_pages() == set(running.pages[3:])


def test_a_sequence_waits_for_pages_that_are_kept_after_they_were_freed(spec: ModelSpec) -> None:
    batch = Batch(spec, 4)
    ended = batch.joined(12)
    batch.kv.pages.keep_freed()
    batch.end(ended)
    waiting = batch.entered(12)
    batch.batch.plan()
    assert (waiting.state, waiting.error) == (SequenceState.WAITING, None)
    batch.kv.rearrange(batch.kv.new_layers(4, spec.num_kv_heads), None)
    batch.batch.plan()
    assert waiting.state is SequenceState.LOADING
