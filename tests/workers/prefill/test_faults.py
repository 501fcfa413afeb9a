"""Prefills whose clients, decode sides or holders go away in the middle: nothing hangs, nothing is kept."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest

from kvstore.client.worker_client import WorkerClient
from kvstore.pool.segment import Segment
from mooncake.errors import PoolError
from mooncake.messages.pools import PoolShard
from mooncake.messages.workers import WorkFailed
from tests.kvstore.holder import NUM_PIECES, Answer
from tests.kvstore.nodes import DEADLINE_S
from tests.kvstore.nodes import until as pool_until
from tests.messenger.proxy import proxied
from tests.workers.gate import Gate
from tests.workers.prefill.test_equality import assert_equal, holding
from tests.workers.prefill_lab import (
    BLOCK_SIZE,
    Lab,
    Receiving,
    Setting,
    StartLab,
    endless_patience,
)
from tests.workers.references import prompt_of
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.kvcache import prefix_fetch
from workers.kvcache.copies import BlockCopy, LayerCopies, StagedLayer, copies_for
from workers.kvcache.prefix_fetch import SILENCE_S

pytestmark = pytest.mark.cluster


async def gone(lab: Lab, receiving: Receiving) -> None:
    """The job has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while receiving.ref in lab.jobs.refs:
            await asyncio.sleep(0.001)


async def test_aborted_prefill_stops_between_two_layers(start_lab: StartLab) -> None:
    prompt, gate = prompt_of(1, 300), Gate(load=1)
    async with start_lab() as lab:
        plain = lab.plain(prompt)
        lab.put(lab.prefill_node, lab.keys_of(prompt)[:10], plain.blocks[:10])
        async with lab.running(Setting(make_copies=gate.make)):
            receiving = await lab.order(prompt)
            computed = lab.computed_layers()
            await gate.reached()
            lab.jobs.cancel(receiving.ref)
            await asyncio.sleep(0)
            assert lab.executor.kv.pages.num_free < lab.executor.kv.pages.num_pages  # still in the pass
            gate.open()
            await gone(lab, receiving)
            assert set(computed) <= {0}  # no further layer
            assert lab.executor.kv.pages.num_free == lab.executor.kv.pages.num_pages
            assert not receiving.answered.done()
            await receiving.release()


async def test_waiting_prompts_can_be_aborted(start_lab: StartLab) -> None:
    gate = Gate(store=0)
    setting = Setting(16, overlap=False, make_copies=gate.make)  # nothing is computed while that is closed
    async with start_lab() as lab, lab.running(setting):
        orders = [await lab.order(prompt_of(seed, 50)) for seed in range(4)]
        await gate.reached()
        for receiving in orders[1:]:
            lab.jobs.cancel(receiving.ref)
        for receiving in orders[1:]:
            await gone(lab, receiving)
            await receiving.release()
        gate.open()
        assert (await orders[0].result()).num_cached_tokens == 0


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_prompt_that_is_aborted_as_its_last_pass_ends_is_computed_when_it_comes_again(
    start_lab: StartLab, num_stages: int
) -> None:
    """A retry of the same prompt must not wait for blocks of the aborted attempt."""
    prompt, gate = prompt_of(7, 200), Gate(store=0)
    async with (
        start_lab(num_stages=num_stages) as lab,
        lab.running(Setting(overlap=False, make_copies=gate.make)),
    ):
        aborted = await lab.order(prompt)
        await gate.reached()
        gate.open()
        lab.executor.submit(lambda: None).result(DEADLINE_S)  # the pass has ended, and nobody knows it yet
        lab.jobs.cancel(aborted.ref)
        await aborted.release()
        again = await lab.order(prompt)
        assert (await again.result()).tokens == lab.plain(prompt).tokens


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_decode_side_that_dies_in_mid_prefill_fails_the_attempt(
    start_lab: StartLab, num_stages: int
) -> None:
    gate = Gate(store=2)
    async with (
        start_lab(num_stages=num_stages) as lab,
        lab.running(Setting(make_copies=gate.make, stage=num_stages - 1)),
    ):
        receiving = await lab.order(prompt_of(2, 60))
        await gate.reached()
        lab.decode_node.kill()
        gate.open()
        failures = await answers_of(lab, receiving)
        assert isinstance(failures[-1], WorkFailed)
        assert failures[-1].retryable


async def answers_of(lab: Lab, receiving: Receiving) -> list[object]:
    await gone(lab, receiving)
    return lab.answers[receiving.ref]


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "emptied"])
async def test_real_holder_that_goes_away_costs_nothing_but_time(start_lab: StartLab, kill: bool) -> None:
    """The first layers have come by then, the last ones cannot before it has gone."""
    prompt = prompt_of(3, 5 * BLOCK_SIZE + 3)
    async with start_lab("tcp") as lab:
        plain = lab.plain(prompt)
        node, client = await lab.holder("tcp")
        lab.put(node, lab.keys_of(prompt), plain.blocks[:5])
        async with lab.running(Setting(8)), proxied(client.address.tcp_endpoints[0]) as proxy:
            proxy.slow(256, 0.01)
            near = msgspec.structs.replace(client.address, tcp_endpoints=(proxy.endpoint,))
            receiving = await lab.order(prompt, lab.source(near, 5))
            stats = await pool_until(lab.prefill, lambda stats: sum(stats.received_bytes.values()) > 0)
            proxy.black_hole()
            assert sum(stats.received_bytes.values()) < 5 * lab.layout.block_bytes
            assert stats.num_sealed == 0
            if kill:
                await asyncio.to_thread(node.kill)
                proxy.reset()
            else:
                lab.clear(node)
                proxy.heal()
            result = await receiving.result()
            assert_equal(result, plain, 0, same_arithmetic=False)
            if kill:
                assert result.num_cached_tokens == 0
        await client.close()


class PiecesClock:
    """The worker's clock: each piece of a slow holder's answer takes `piece_s` on it.

    A piece leaves when the worker has heard that the one before came, however slow the machine is.
    """

    def __init__(self, piece_s: float) -> None:
        self._piece_s = piece_s
        self._now_s = self._heard_s = 1000.0
        self._hearing = threading.Condition()

    def monotonic(self) -> float:
        return self._now_s

    def heard(self, now_s: float) -> None:
        with self._hearing:
            self._heard_s = now_s
            self._hearing.notify_all()

    def pause(self) -> None:
        with self._hearing:
            assert self._hearing.wait_for(lambda: self._heard_s == self._now_s, DEADLINE_S)
            self._now_s += self._piece_s


@pytest.mark.parametrize(
    ("layer", "piece_s"),
    [
        (0, 0.18 * SILENCE_S),
        (2, 0.3 * SILENCE_S),
    ],
    ids=["first layer", "third layer"],
)
async def test_holder_that_is_slow_but_goes_on_sending_is_waited_for(
    start_lab: StartLab, layer: int, piece_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder needs longer than `SILENCE_S`, but at its pace every layer comes before the deadline."""
    prompt, clock = prompt_of(3, 5 * BLOCK_SIZE + 3), PiecesClock(piece_s)
    assert NUM_PIECES * piece_s > SILENCE_S
    monkeypatch.setattr(prefix_fetch, "time", clock)
    fetch = WorkerClient.fetch

    async def heard_fetch(
        pool: WorkerClient,
        reservation_id: int,
        sources: Sequence[PoolShard],
        blocks: Sequence[int],
        on_layers: Callable[[int, int], None],
    ) -> tuple[list[int], list[int]]:
        def hear(num_blocks: int, num_layers: int) -> None:
            on_layers(num_blocks, num_layers)
            clock.heard(clock.monotonic())

        return await fetch(pool, reservation_id, sources, blocks, hear)

    monkeypatch.setattr(WorkerClient, "fetch", heard_fetch)
    async with start_lab("tcp") as lab:
        plain = lab.plain(prompt)
        keys = lab.keys_of(prompt)
        with holding(lab, keys, plain, Answer.IN_PIECES, layer, clock.pause) as holder:
            (result,) = await lab.results(Setting(), [prompt], lab.source(holder.address, len(keys)))
        assert_equal(result, plain, 5, same_arithmetic=False)
        assert result.num_cached_tokens == 5 * BLOCK_SIZE


@pytest.mark.parametrize("layer", [0, 2], ids=["before the pass", "in the pass"])
async def test_prompt_that_is_aborted_while_it_is_fetched_ends_at_once(
    start_lab: StartLab, layer: int
) -> None:
    prompt, gate = prompt_of(3, 5 * BLOCK_SIZE + 3), Gate(load=layer - 1)
    async with start_lab("tcp") as lab:
        plain = lab.plain(prompt)
        keys = lab.keys_of(prompt)
        asked = threading.Event()
        with holding(lab, keys, plain, Answer.HANG, layer, asked=asked) as holder, endless_patience():
            async with lab.running(Setting(make_copies=gate.make)):
                receiving = await lab.order(prompt, lab.source(holder.address, len(keys)))
                assert await asyncio.to_thread(asked.wait, DEADLINE_S)
                if layer:
                    await gate.reached()
                    gate.open()
                lab.jobs.cancel(receiving.ref)
                await gone(lab, receiving)  # nobody loses patience
                assert not receiving.answered.done()
                await receiving.release()
                holder.close()


async def test_store_that_fails_fails_its_prompt_and_no_other(start_lab: StartLab) -> None:
    prompts = [prompt_of(seed, 3 * BLOCK_SIZE + 3) for seed in range(2)]
    failing = FailingStore(layer=2)
    async with start_lab() as lab:
        plain = [lab.plain(prompt) for prompt in prompts]
        async with lab.running(Setting(make_copies=failing.make)):
            failed, other = [await lab.order(prompt) for prompt in prompts]
            (failure,) = await answers_of(lab, failed)
            assert isinstance(failure, WorkFailed)
            assert failure.retryable
            assert failure.reason == FailingStore.REASON
            assert_equal(await other.result(), plain[1], 0, same_arithmetic=False)
            await failed.release()
        with lab.client(lab.prefill_node) as pool:
            assert pool.prefix_len(lab.keys_of(prompts[0])) == 0
            assert pool.prefix_len(lab.keys_of(prompts[1])) == 3
        (again,) = await lab.results(Setting(), prompts[:1])
        assert_equal(again, plain[0], 0, same_arithmetic=False)


class FailingStore:
    """LayerCopies of which one fails: the first store of `layer`."""

    REASON = "the page cannot be written"

    def __init__(self, layer: int) -> None:
        self._layer: int | None = layer

    def make(self, kv: DeviceKVCache, segment: Segment) -> LayerCopies:
        copies = copies_for(kv, segment)
        store = copies.store

        def store_or_fail(layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
            if layer == self._layer:
                self._layer = None
                raise PoolError(self.REASON)
            return store(layer, blocks, staged)

        copies.store = store_or_fail  # type: ignore[method-assign]
        return copies


async def test_reused_tokens_are_counted_by_source(start_lab: StartLab) -> None:
    prompt = prompt_of(5, 6 * BLOCK_SIZE + 3)
    async with start_lab() as lab:
        plain = lab.plain(prompt)
        keys = lab.keys_of(prompt)
        node, client = await lab.holder("auto")
        lab.put(node, keys[:5], plain.blocks[:5])
        lab.put(lab.prefill_node, keys[:2], plain.blocks[:2])
        async with lab.running(Setting()) as runner:
            receiving = await lab.order(prompt, lab.source(client.address, 5))
            await receiving.result()
            assert runner.num_tokens == {
                "dram": 2 * BLOCK_SIZE,
                "remote": 3 * BLOCK_SIZE,
                "computed": BLOCK_SIZE + 3,
            }
        await client.close()
