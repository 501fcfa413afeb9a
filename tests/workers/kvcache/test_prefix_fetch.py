"""How long a worker waits for a prefix from another pool, on a clock that the test moves."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import MessengerAddress, PoolShard
from tests.kvstore.nodes import DEADLINE_S
from workers.kvcache import prefix_fetch
from workers.kvcache.prefix_fetch import SILENCE_S, PrefixFetch

NUM_LAYERS, NUM_BLOCKS = 4, 3
LAYOUT = KVLayout(NUM_LAYERS, num_kv_heads=1, head_dim=16, block_size=16, dtype="float32")
SOURCES = (PoolShard(MessengerAddress("holder", 1, "elsewhere", "", ()), LAYOUT),)
TOO_LONG_S = 1.01 * SILENCE_S


class FakePool:
    """The own messenger, which says what the test lets it say."""

    def __init__(self) -> None:
        self.segment = SimpleNamespace(layout=LAYOUT)
        self.num_stopped = 0
        self.says: Callable[[int, int], None]
        self.is_asked = asyncio.Event()
        self._answer: asyncio.Future[tuple[list[int], list[int]]] = asyncio.Future()

    async def fetch(
        self,
        reservation_id: int,
        sources: Sequence[PoolShard],
        blocks: Sequence[int],
        on_layers: Callable[[int, int], None],
    ) -> tuple[list[int], list[int]]:
        self.says = on_layers
        self.is_asked.set()
        return await self._answer

    async def stop_fetch(self, reservation_id: int) -> None:
        assert self.is_asked.is_set(), "there would be nothing to stop"
        self.num_stopped += 1
        self.end(0)

    def end(self, num_layers: int) -> None:
        self._answer.set_result(([num_layers] * NUM_BLOCKS, list(range(NUM_BLOCKS))))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.num_looks = 0
        """at it, by threads that wait for a layer"""

    def monotonic(self) -> float:
        self.num_looks += threading.current_thread() is not threading.main_thread()
        return self.now_s

    async def looked_at(self, num_looks: int) -> None:
        """Returns when there have been more looks than so many."""
        async with asyncio.timeout(DEADLINE_S):
            while self.num_looks <= num_looks:
                await asyncio.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(prefix_fetch, "time", clock)
    return clock


async def fetching() -> tuple[PrefixFetch, FakePool]:
    pool = FakePool()
    fetch = PrefixFetch(pool, 1, SOURCES, range(NUM_BLOCKS))  # type: ignore[arg-type]
    await pool.is_asked.wait()
    return fetch, pool


async def is_waiting(task: "asyncio.Task[None]") -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_layer_is_waited_for_as_long_as_signs_of_life_come(clock: Clock) -> None:
    fetch, pool = await fetching()
    pool.says(NUM_BLOCKS, 1)
    awaiting = asyncio.create_task(asyncio.to_thread(fetch.await_layer, 1, NUM_BLOCKS))
    await clock.looked_at(0)
    for _ in range(4):
        clock.now_s += 0.9 * SILENCE_S
        num_looks = clock.num_looks
        pool.says(NUM_BLOCKS, 1)
        await clock.looked_at(num_looks)
    assert not awaiting.done()
    pool.says(NUM_BLOCKS, 2)
    assert await asyncio.wait_for(awaiting, DEADLINE_S)
    pool.end(2)
    await fetch.ended()


async def test_silence_counts_from_the_last_sign_of_life_and_for_all_layers(clock: Clock) -> None:
    fetch, pool = await fetching()
    pool.says(NUM_BLOCKS, 1)
    clock.now_s += TOO_LONG_S
    assert not fetch.await_layer(1, NUM_BLOCKS)
    pool.says(NUM_BLOCKS, 1)
    assert not fetch.await_layer(2, NUM_BLOCKS)  # it has made others wait once
    assert fetch.await_layer(0, NUM_BLOCKS)
    clock.now_s += TOO_LONG_S
    await fetch.ended()
    assert pool.num_stopped == 1


async def test_source_that_sends_for_ever_is_given_up_in_the_end(clock: Clock) -> None:
    fetch, pool = await fetching()
    begun_s = clock.now_s
    begun = asyncio.create_task(fetch.begun())
    while await is_waiting(begun):
        clock.now_s += 0.9 * SILENCE_S
        pool.says(NUM_BLOCKS, 0)
        assert clock.now_s < begun_s + DEADLINE_S
    assert clock.now_s > begun_s + 3 * SILENCE_S
    assert pool.num_stopped == 1
    assert not fetch.await_layer(0, NUM_BLOCKS)


async def test_prompt_joins_a_pass_when_the_last_layers_are_near(clock: Clock) -> None:
    fetch, pool = await fetching()
    begun = asyncio.create_task(fetch.begun())
    pool.says(NUM_BLOCKS, 0)
    assert await is_waiting(begun)
    clock.now_s += 0.5 * SILENCE_S
    pool.says(NUM_BLOCKS, 1)
    assert await is_waiting(begun)  # three times as much is still to come
    clock.now_s += 0.5 * SILENCE_S
    pool.says(NUM_BLOCKS, 2)
    await asyncio.wait_for(begun, DEADLINE_S)
    assert fetch.expected_indices == list(range(NUM_BLOCKS))
    pool.end(NUM_LAYERS)
    await fetch.ended()
    assert pool.num_stopped == 0


async def test_prompt_joins_the_sooner_the_longer_its_pass_computes(clock: Clock) -> None:
    fetch, pool = await fetching()
    begun = asyncio.create_task(fetch.begun(compute_s=SILENCE_S))
    clock.now_s += 0.9 * SILENCE_S
    pool.says(NUM_BLOCKS, 1)
    assert await is_waiting(begun)  # 2.7 times `SILENCE_S` are left, of which the pass computes one
    clock.now_s += 0.9 * SILENCE_S
    pool.says(NUM_BLOCKS, 2)
    await asyncio.wait_for(begun, DEADLINE_S)
    pool.end(NUM_LAYERS)
    await fetch.ended()


async def test_source_that_is_seen_to_be_too_slow_is_given_up_early(clock: Clock) -> None:
    fetch, pool = await fetching()
    begun = asyncio.create_task(fetch.begun())
    for num_layers in (0, 0, 1):
        assert await is_waiting(begun)
        clock.now_s += 0.9 * SILENCE_S
        pool.says(NUM_BLOCKS, num_layers)
    await asyncio.wait_for(begun, DEADLINE_S)
    assert fetch.has_ended
    assert pool.num_stopped == 1


async def test_fetch_can_be_stopped_as_soon_as_it_has_begun(clock: Clock) -> None:
    pool = FakePool()
    fetch = PrefixFetch(pool, 1, SOURCES, range(NUM_BLOCKS))  # type: ignore[arg-type]
    await fetch.ended(silence_s=0)
    assert fetch.has_ended
    assert pool.num_stopped == 1
