"""Divisions of running sequences, without a device that computes."""

import asyncio
from collections.abc import Callable, Iterator
from fractions import Fraction
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
import torch

from tests.deadline import DEADLINE_S
from tests.workers.decode.batching.test_batch import Batch
from tests.workers.decode.batching.test_division import have_helper
from workers.decode.batch_loop import BatchLoop
from workers.decode.migration import rearranger
from workers.decode.migration.kvcache_move import KVCacheMove
from workers.decode.migration.moves_meter import MovesMeter
from workers.decode.migration.rearranger import Rearranger
from workers.engine.spec import ModelSpec
from workers.modules.prompts import Prompts

SPEC = ModelSpec("LlamaForCausalLM", 32, 16, 16, 2, 2, 1, 8, 4096)


class Dividing:
    """A running sequence of 12 pages, six of which are to be at a helper, and are copied two at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = Batch(SPEC, 24)
        self.kv, self.sequence = batch.kv, batch.joined(46)
        self.helper = have_helper(self.kv, Fraction(1, 2), 20)
        self.before, self.num_free = list(self.sequence.pages), self.kv.pages.num_free
        self.loop = Mock(spec=BatchLoop)
        self.rearranger = Rearranger(
            Mock(kv=self.kv),
            batch.batch,
            MagicMock(),
            self.loop,
            AsyncMock(Prompts),
            AsyncMock(),
            MovesMeter(),
        )
        self.nums_copied: list[int] = []
        self.on_copy: Callable[[], None] = Mock()
        """A callback at the begin of each copy, on the thread that copies."""
        gather = self.kv.gather

        def gathered(layer: int, pages: torch.Tensor) -> torch.Tensor:
            self.nums_copied.append(len(pages))
            self.on_copy()
            return gather(layer, pages)

        monkeypatch.setattr(self.kv, "gather", gathered)
        monkeypatch.setattr(rearranger, "COPIED_BYTES", 2 * self.kv.page_bytes)

    def lose_helper(self) -> None:
        self.helper.is_closed = True

    @property
    def has_changed_nothing(self) -> bool:
        return (self.sequence.pages, self.kv.pages.num_free) == (self.before, self.num_free)


@pytest.fixture
def dividing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dividing]:
    dividing = Dividing(monkeypatch)
    yield dividing
    dividing.rearranger.close()


async def test_full_pages_go_to_the_helper_some_at_a_time(dividing: Dividing) -> None:
    kv, sequence = dividing.kv, dividing.sequence
    kv.layer(0)[:] = torch.rand(kv.layer_shape)
    expected = kv.gather(0, torch.tensor(sequence.pages))
    dividing.nums_copied.clear()
    await dividing.rearranger.divide(again=False)
    assert dividing.nums_copied == [2, 2, 2]
    assert kv.pages.num_hosted_of(sequence.pages) == 6
    assert torch.equal(kv.gather(0, torch.tensor(sequence.pages)), expected)


async def test_no_page_goes_to_a_helper_that_is_lost_while_pages_are_copied(dividing: Dividing) -> None:
    dividing.on_copy = dividing.lose_helper
    await dividing.rearranger.divide(again=False)
    assert dividing.nums_copied == [2]
    assert dividing.has_changed_nothing


async def test_no_page_goes_to_a_helper_that_is_lost_before_iterations_stop(dividing: Dividing) -> None:
    dividing.loop.quiet.side_effect = dividing.lose_helper
    await dividing.rearranger.divide(again=False)
    assert dividing.has_changed_nothing


async def test_a_session_that_ends_waits_for_no_further_copy(dividing: Dividing) -> None:
    loop, divide = asyncio.get_running_loop(), asyncio.create_task(dividing.rearranger.divide(again=False))

    async def cancelled() -> None:
        divide.cancel()
        for _ in range(20):  # the task does what it does at once
            await asyncio.sleep(0)

    def end_session() -> None:
        asyncio.run_coroutine_threadsafe(cancelled(), loop).result(DEADLINE_S)

    dividing.on_copy = end_session
    with pytest.raises(asyncio.CancelledError):
        await divide
    assert dividing.nums_copied == [2]
    assert dividing.has_changed_nothing


async def test_pages_that_come_or_go_beside_the_others_are_not_copied_in_rounds(
    dividing: Dividing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rearranger, "_FEW_PAGES", 4)
    beside = AsyncMock()
    monkeypatch.setattr(dividing.rearranger, "beside", beside)
    move = KVCacheMove(Mock(), dividing.kv, dividing.kv.pages.num_own, None)
    assert await dividing.rearranger.pre_copy(move) == set()
    assert not beside.await_count


async def test_no_page_is_copied_in_the_pause_where_pages_come_or_go_beside_the_others(
    dividing: Dividing, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, copied = KVCacheMove(Mock(), dividing.kv, dividing.kv.pages.num_own, None), list[int]()
    monkeypatch.setattr(move, "copy", copied.extend)
    monkeypatch.setattr(dividing.kv, "take_memory_beside", Mock())
    await dividing.rearranger.switch(move, set())
    assert copied == []
    assert dividing.kv.hosted_pages is None
    assert dividing.sequence.pages == dividing.before
