"""Prefill and decode runners with real messengers: right tokens, and nothing held when the work has ended."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake.messages.requests import SamplingParams
from tests.workers.mini_cluster import MiniCluster, Sizes, StartCluster, tokens_of
from tests.workers.references import Reference, prompt_of

GREEDY = SamplingParams(max_tokens=12, temperature=0)


ALL_SIZES = (
    Sizes(prefill_chunk=1000),
    Sizes(prefill_chunk=8),
    Sizes(prefill_chunk=5),
    Sizes(max_batch=2),
    Sizes(num_pool_pages=14),  # two of the prompts, never all
    Sizes(num_device_pages=12),  # sequences are preempted
    Sizes(num_device_pages=12, num_pool_pages=14),
    Sizes(block_size=1, num_device_pages=256, num_pool_pages=256),
    Sizes(block_size=5, num_device_pages=40),
    Sizes(block_size=32),
    Sizes(inline=True),
    Sizes(inline=True, num_device_pages=12),
)


def sizes_and_orders() -> Iterator[Any]:
    """Yield all sizes in each order. Without a soak each has the given order and one of the others."""
    for number, sizes in enumerate(ALL_SIZES):
        yield pytest.param(sizes, "as given", id=f"as given-{sizes}")
        for place, order in enumerate(("longest first", "one by one")):
            mark = pytest.mark.cluster if number % 2 == place else pytest.mark.soak
            yield pytest.param(sizes, order, id=f"{order}-{sizes}", marks=mark)


@pytest.mark.parametrize(("sizes", "order"), list(sizes_and_orders()))
async def test_tokens_do_not_depend_on_sizes_and_orders(
    start_cluster: StartCluster, reference: Reference, sizes: Sizes, order: str
) -> None:
    lengths = (48, 47, 33, 16, 9, 8, 7, 1) if order == "longest first" else (1, 7, 8, 9, 16, 33, 47, 48)
    prompts = [prompt_of(length, length) for length in lengths]
    expected = [reference(prompt, GREEDY.max_tokens) for prompt in prompts]
    async with start_cluster(sizes) as cluster:
        for attempt in ("fresh", "cached"):
            answers = []
            for index, prompt in enumerate(prompts):
                answers.append(cluster.submit(f"{attempt}-{index}", prompt, GREEDY))
                while order == "one by one" and not answers[-1].tokens:
                    await asyncio.sleep(0)
            assert [await tokens_of(answer) for answer in answers] == expected
        await cluster.assert_nothing_is_held()


async def test_cached_tokens_are_those_of_the_longest_sealed_prefix(
    start_cluster: StartCluster, reference: Reference
) -> None:
    prompt = prompt_of(1, 40)

    async def cached(cluster: MiniCluster, request_id: str, tokens: list[int]) -> int | None:
        answer = cluster.submit(request_id, tokens, GREEDY)
        assert await tokens_of(answer) == reference(tokens, GREEDY.max_tokens)
        return answer.num_cached_tokens

    async with start_cluster() as cluster:
        assert await cached(cluster, "a", prompt) == 0
        assert await cached(cluster, "b", prompt) == 39  # one token is always computed
        assert await cached(cluster, "c", prompt[:20]) == 16
        assert await cached(cluster, "d", prompt[:17] + prompt_of(2, 20)) == 16
        assert await cached(cluster, "e", prompt_of(3, 8) + prompt[8:]) == 0
        await cluster.assert_nothing_is_held()


async def test_only_blocks_that_decode_lacks_travel(start_cluster: StartCluster) -> None:
    prompt = prompt_of(4, 44)
    async with start_cluster() as cluster:
        [_, decode] = cluster.instances
        received = []
        for request_id, tokens in (("a", prompt), ("b", prompt), ("c", [*prompt, *prompt_of(5, 4)])):
            await tokens_of(cluster.submit(request_id, tokens, GREEDY))
            await cluster.idle()
            stats = await decode.pool.stats()
            received.append(sum(stats.received_bytes.values()) // cluster.layout.block_bytes)
        # Six blocks, then the partial one again, then the now full one.
        assert received == [6, 7, 8]


async def test_seeded_draws_depend_neither_on_the_batch_nor_on_the_cache(start_cluster: StartCluster) -> None:
    def sampling(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=10, temperature=1.0, top_p=0.95, top_k=50, seed=seed)

    prompts = [prompt_of(seed, 20 + seed) for seed in range(6)]
    async with start_cluster() as cluster:
        alone = [
            await tokens_of(cluster.submit(f"alone-{seed}", prompt, sampling(seed)))
            for seed, prompt in enumerate(prompts)
        ]
        together = [
            cluster.submit(f"together-{seed}", prompt, sampling(seed)) for seed, prompt in enumerate(prompts)
        ]
        assert [await tokens_of(answer) for answer in together] == alone
        other = await tokens_of(cluster.submit("other", prompts[0], sampling(99)))
        assert other != alone[0]


@pytest.mark.cluster
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(num_pool_pages=16, num_device_pages=14),
        Sizes(num_device_pages=20, max_batch=4, idle_cores=frozenset({0})),
        Sizes(num_device_pages=20, inline=True),
    ],
    ids=["ample", "scarce", "preempting and giving way", "inlining"],
)
@pytest.mark.parametrize(
    ("seed", "num_requests"), [(0, 100), pytest.param(1, 2000, marks=pytest.mark.soak)], ids=["100", "2000"]
)
async def test_random_aborts_leave_nothing_behind(
    start_cluster: StartCluster, reference: Reference, sizes: Sizes, seed: int, num_requests: int
) -> None:
    rng = random.Random(seed)
    prompts = [prompt_of(index, rng.randrange(1, 60)) for index in range(8)]
    expected = [reference(prompt, 40) for prompt in prompts]
    cancelled_after = []  # tokens

    async def one(cluster: MiniCluster, number: int) -> None:
        index, name, max_tokens = number % 8, f"r{number}", rng.randrange(1, 41)
        most_tokens = rng.choice([0, 0, *range(1, max_tokens + 1)]) if rng.random() < 0.6 else max_tokens
        num_turns = rng.randrange(60)
        answer = cluster.submit(name, prompts[index], SamplingParams(max_tokens, temperature=0))
        while len(answer.tokens) < most_tokens and not answer.ended.is_set():
            await asyncio.sleep(0.001)
        if most_tokens < max_tokens:
            for _ in range(num_turns):  # until it is here or there
                await asyncio.sleep(0)
        if most_tokens == max_tokens or answer.ended.is_set():
            assert await tokens_of(answer) == expected[index][:max_tokens]
        else:
            cluster.cancel(name)
            cancelled_after.append(len(answer.tokens))

    async def client(cluster: MiniCluster, numbers: range) -> None:
        for number in numbers:
            await one(cluster, number)

    async with start_cluster(sizes, timeout_s=500) as cluster:
        async with asyncio.TaskGroup() as clients:
            for first in range(16):
                clients.create_task(client(cluster, range(first, num_requests, 16)))
        await cluster.assert_nothing_is_held()
        gave_way = cluster.instances[1].decode.meter.stats.pause_s > 0
        assert gave_way == bool(sizes.idle_cores)
    assert any(cancelled_after)
    assert not all(cancelled_after)
