"""Who may join the batch of a decode instance, and who waits for that to become smaller."""

import asyncio

import pytest

from mooncake.messages.heartbeats import DecodeLoad
from mooncake.messages.requests import Ref, Request, SamplingParams
from workers.decode.sequence import Sequence
from workers.decode.tbt_slo.double_check import DoubleCheck, HeldTokens, TooSlowError
from workers.decode.tbt_slo.tbt import IterationPredictors

REQUEST_S, SLO_S = 0.01, 0.035
LONG_S = 1000.0


class Decoding:
    """A batch in which each request takes as long, so that three of them are as many as there may be.

    An iteration without a batch takes `empty_s`.
    """

    def __init__(self, size: int, empty_s: float = 0.0, max_batch: int = 32) -> None:
        self._empty_s = empty_s
        self.predictors = IterationPredictors()
        self.predictors.tbt = self  # type: ignore[assignment]
        self.check = DoubleCheck(self.predictors, max_batch)
        self.batch = [self.sequence() for _ in range(size)]

    def predict_s(self, batch_size: int, num_kv_tokens: int) -> float:
        return self._empty_s + REQUEST_S * batch_size

    def sequence(self) -> Sequence:
        request = Request("r", [1], [], SamplingParams(9), "front")
        return Sequence(0, Ref(1, "r", 1), request, [1], tbt_slo_s=SLO_S)

    async def join(self, time_left_s: float | None) -> Sequence:
        sequence = self.sequence()
        await self.check.wait_turn(sequence, lambda: self.batch, time_left_s)
        self.batch.append(sequence)
        return sequence

    def leave(self) -> None:
        self.batch.pop(0)
        self.check.recheck()


async def settled() -> None:
    """Everybody has done what can be done now."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_request_beyond_the_slots_is_predicted_to_wait_for_one() -> None:
    decoding = Decoding(2, max_batch=2)
    assert decoding.check.load(decoding.batch).tbt_s == pytest.approx(2 * REQUEST_S)
    load = decoding.check.load([*decoding.batch, decoding.sequence()])
    # A third waits half as long as it is decoded, by chance three times that: 15 of the gaps of its TBT.
    assert load.tbt_s == pytest.approx((1 + 1.5 / 0.1) * 2 * REQUEST_S)
    with pytest.raises(TooSlowError, match=r"a token would take 320\.0 ms"):
        await decoding.join(None)
    decoding.leave()
    await decoding.join(None)


async def test_those_that_do_not_fit_wait_and_join_in_the_order_in_which_they_came() -> None:
    decoding = Decoding(3)
    first, second = (asyncio.ensure_future(decoding.join(LONG_S)) for _ in range(2))
    decoding.check.recheck()
    await settled()
    assert not first.done()
    decoding.leave()
    await settled()
    assert (first.done(), second.done()) == (True, False)
    assert len(decoding.batch) == 3
    decoding.leave()
    await second
    assert decoding.batch[-1] is second.result()


async def test_who_may_not_wait_is_refused_at_once_and_says_what_was_predicted() -> None:
    for time_left_s in (None, 0.0, -1.0):
        with pytest.raises(TooSlowError, match="40") as refusal:
            await Decoding(3).join(time_left_s)
        assert refusal.value.batch_size == 4
        assert refusal.value.predicted_tbt_s == pytest.approx(4 * REQUEST_S)
    for size in (0, 2):
        await Decoding(size).join(-1.0)


async def test_a_margin_is_kept_of_what_the_batch_adds() -> None:
    with pytest.raises(TooSlowError, match=r"34\.0 ms in this batch, at most 35 ms .* 3\.0 ms of them"):
        await Decoding(2, empty_s=0.004).join(-1.0)  # of 34 ms the batch adds 30
    await Decoding(0, empty_s=0.034).join(-1.0)
    await Decoding(1, empty_s=0.013).join(-1.0)  # of 33 ms the batch adds 20


async def test_whose_time_is_over_is_refused_and_the_next_one_stands_first() -> None:
    decoding = Decoding(3)
    first = asyncio.ensure_future(decoding.join(0.01))
    await settled()
    second = asyncio.ensure_future(decoding.join(LONG_S))
    with pytest.raises(TooSlowError):
        await first
    decoding.leave()
    await second


async def test_its_load_is_all_that_it_has_and_says_who_waits() -> None:
    decoding = Decoding(3)
    waiting = asyncio.ensure_future(decoding.join(LONG_S))
    await settled()
    reserved = [decoding.sequence(), decoding.sequence()]
    assert decoding.check.load([*decoding.batch, *reserved]) == DecodeLoad(5, 1, 5 * REQUEST_S)
    decoding.leave()
    await waiting
    assert decoding.check.load(decoding.batch) == DecodeLoad(3, 0, 3 * REQUEST_S)


def test_its_load_counts_the_prompt_tokens_that_are_left_and_says_what_one_costs() -> None:
    decoding = Decoding(1)
    request = Request("r", [1] * 9, [], SamplingParams(9), "front")
    inlined, prefilled = (Sequence(0, Ref(1, "r", 1), request, [1] * 9) for _ in range(2))
    inlined.is_inlined = True
    assert decoding.check.load([inlined, prefilled]) == DecodeLoad(2, 0, 2 * REQUEST_S, 9, 0.0)
    inlined.num_cached_tokens, inlined.num_computed_tokens = 4, 2
    decoding.predictors.prompt_cost.observe(100, 5000, 0.2)
    assert decoding.check.load([inlined, prefilled]) == DecodeLoad(2, 0, 2 * REQUEST_S, 3, 0.002)
    inlined.tokens.append(1)
    assert decoding.check.load([inlined, prefilled]) == DecodeLoad(2, 0, 2 * REQUEST_S, 0, 0.002)


async def test_who_is_cancelled_leaves_its_place_to_the_next_one() -> None:
    decoding = Decoding(3)
    first, second = (asyncio.ensure_future(decoding.join(LONG_S)) for _ in range(2))
    await settled()
    first.cancel()
    decoding.leave()
    await second
    assert first.cancelled()


def test_waiting_for_its_turn_is_waiting_for_the_batch_and_not_for_its_kvcache() -> None:
    sequence = Decoding(0).sequence()
    assert (sequence.arrival_s, sequence.joining_s) == (None, None)
    sequence.ordered_s, sequence.turn_s, sequence.arrived_s = 1.0, 3.0, 3.5
    assert (sequence.arrival_s, sequence.joining_s) == (0.5, None)
    sequence.joined_s = 4.5
    assert (sequence.arrival_s, sequence.joining_s) == (0.5, 3.0)


async def test_a_held_token_that_its_caller_takes_at_once_asks_for_no_further_turn() -> None:
    decoding, released = Decoding(2), asyncio.Event()
    held_tokens = HeldTokens(released.set)
    of_iteration, of_timer = decoding.batch
    held_tokens.hold(of_iteration, LONG_S)
    held_tokens.begun(decoding.batch)
    assert held_tokens.take_released() == [of_iteration.newest_output]
    assert not released.is_set()
    held_tokens.hold(of_timer, 0.0)
    await released.wait()
    assert held_tokens.take_released() == [of_timer.newest_output]
