"""What one engine has stored another one loads, whatever their pages look like; what is lost is computed."""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.connectors.vllm.worker import pages as engine_pages
from mooncake.messages.blocks import KVLayout, block_keys, client_salt, root_key
from mooncake.messages.pools import Tier
from tests.kvstore.connectors.engine import Engine, Outcome, Request
from tests.kvstore.nodes import FINGERPRINT
from tests.kvstore.pools import Pool, Pools, until

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=8, dtype="float32")
MakeEngine = Callable[..., Engine]


@pytest.fixture
def pools(short_tmp_path: Path) -> Iterator[Pools]:
    with Pools(short_tmp_path) as pools:
        yield pools


@pytest.fixture
def engine_of() -> Iterator[MakeEngine]:
    """Makes an engine on a pool: `engine_of(pool, page_tokens)`; all are ended with the test."""
    with contextlib.ExitStack() as stack:

        def make(pool: Pool, page_tokens: int = 8, address: str | None = None, **roles: bool) -> Engine:
            client = stack.enter_context(pool.client(address))
            engine = Engine(client, pool.layout, page_tokens, **roles)
            stack.callback(engine.close)
            return engine

        yield make


def tokens(num: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50000), k=num)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_tokens", [4, 8, 32])
@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_another_engine_loads_what_one_has_computed(
    pools: Pools, engine_of: MakeEngine, page_tokens: int, door: str, dtype: str
) -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=8, dtype=dtype)  # type: ignore[arg-type]
    pool = pools.start(layout=layout, num_pages=64)
    address = getattr(pool, door)
    first, second = engine_of(pool, page_tokens, address), engine_of(pool, page_tokens, address)
    prompt = tokens(101)
    assert first.run(Request(prompt)) == Outcome(0, 0)
    # All but the last token's block, or page.
    assert second.run(Request(prompt)) == Outcome(96, 0)
    assert second.run(Request([*prompt[:64], *tokens(40, seed=1)])) == Outcome(64, 0)


def test_copies_without_a_compiler_are_the_same(
    pools: Pools, engine_of: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    prompt = tokens(77)
    engine_of(pool, 4).run(Request(prompt))
    monkeypatch.setattr(engine_pages, "_native", lambda: None)
    assert engine_of(pool, 32).run(Request(prompt)) == Outcome(64, 0)
    other = tokens(77, seed=1)
    engine_of(pool, 16).run(Request(other))
    monkeypatch.undo()
    assert engine_of(pool, 4).run(Request(other)) == Outcome(72, 0)


def test_steps_may_end_anywhere(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    prompt = tokens(90)
    for chunk in (1, 7, 24):
        with pool.client() as client:
            client.clear()
        engine_of(pool).run(Request(prompt), chunk=chunk)
        assert engine_of(pool).run(Request(prompt)) == Outcome(88, 0)


def test_what_the_engine_has_itself_is_left_as_it_is(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    prompt = tokens(90)
    engine_of(pool, 4).run(Request(prompt))
    # From the middle of a block on.
    assert engine_of(pool, 4).run(Request(prompt), num_local_tokens=12) == Outcome(76, 0)
    assert engine_of(pool, 4).run(Request(prompt), num_local_tokens=88) == Outcome(0, 0)


def test_tenants_and_adapters_share_nothing(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine, prompt = engine_of(pool), tokens(40)
    variants: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"lora_request": "a"}, {"lora_request": "b"}]
    for variant in variants:
        assert engine.run(Request(prompt, **variant)) == Outcome(0, 0)  # type: ignore[arg-type]
    for variant in variants:
        assert engine.run(Request(prompt, **variant)) == Outcome(32, 0)  # type: ignore[arg-type]


def test_images_are_not_shared(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine, prompt = engine_of(pool), tokens(40)
    for _ in range(2):
        assert engine.run(Request(prompt, mm_features=["an image"])) == Outcome(0, 0)


def test_a_producer_stores_and_a_consumer_loads(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    producer, consumer = engine_of(pool, loads=False), engine_of(pool, stores=False)
    prompt, other = tokens(40), tokens(40, seed=1)
    producer.run(Request(prompt))
    consumer.run(Request(other))
    assert producer.run(Request(prompt)) == Outcome(0, 0)
    assert consumer.run(Request(prompt)) == Outcome(32, 0)
    assert consumer.run(Request(other)) == Outcome(0, 0)


def test_keys_are_those_of_workers_and_routers(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    prompt = tokens(40)
    engine_of(pool).run(Request(prompt, cache_salt="tenant"))
    root = root_key(FINGERPRINT, client_salt("tenant"))
    with pool.client() as client:
        assert client.prefix_len(block_keys(prompt, 8, root)) == 5
    named = Request(prompt, cache_salt="anything", kv_transfer_params={"root_key": root.hex()})
    assert engine_of(pool).run(named) == Outcome(32, 0)


@pytest.mark.parametrize("named", ["no digits", "", 7, [], "ab" * 15, "ab" * 17, {"a": 1}])
def test_a_request_with_an_impossible_root_key_shares_nothing(
    pools: Pools, engine_of: MakeEngine, named: object
) -> None:
    """Any client of vLLM may name a root key, and an error in vLLM's scheduler would end all its requests."""
    pool = pools.start(layout=LAYOUT, num_pages=64)
    prompt = tokens(40)
    for _ in range(2):
        request = Request(prompt, kv_transfer_params={"root_key": named})
        assert engine_of(pool).run(request) == Outcome(0, 0)
    assert engine_of(pool).run(Request(prompt)) == Outcome(0, 0)


def test_a_damaged_block_is_computed(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    prompt = tokens(90)
    engine_of(pool).run(Request(prompt))
    keys = block_keys(prompt, 8, root_key(FINGERPRINT))
    pool.damage(keys[5], layer=2)
    other = engine_of(pool)
    assert other.run(Request(prompt)) == Outcome(88, 48)
    # It was dropped and stored again.
    assert other.run(Request(prompt)) == Outcome(88, 0)


def test_a_killed_messenger_is_a_miss(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine, prompt = engine_of(pool), tokens(90)
    engine.run(Request(prompt))
    pool.kill()
    assert engine.run(Request(tokens(90, seed=1))) == Outcome(0, 0)
    pool.start()
    pool.ready()
    fresh = engine_of(pool)
    assert fresh.run(Request(prompt)) == Outcome(88, 0)


def test_a_messenger_killed_between_search_and_load_is_a_miss(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine, prompt = engine_of(pool), tokens(90)
    engine.run(Request(prompt))
    request, pages = Request(prompt), list(range(12))
    assert engine.match(request) == 88
    engine.scheduler.allocated(request, pages, 88)
    pool.kill()
    assert engine.load(request, pages, 88) == 88
    assert engine.match(request) == 0, "a request whose load failed is computed"


@contextlib.contextmanager
def silent(pool: Pool) -> Iterator[None]:
    """A messenger that answers nothing meanwhile."""
    assert pool.process is not None
    os.kill(pool.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pool.process.pid, signal.SIGCONT)


def test_a_silent_messenger_holds_nobody_up(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine = engine_of(pool)
    engine.run(Request(tokens(90)))
    with silent(pool):
        for seed in range(2):
            assert engine.run(Request(tokens(90, seed=seed + 1))) == Outcome(0, 0)


def test_pages_that_are_needed_are_not_kept(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine, request, pages = engine_of(pool), Request(tokens(90)), list(range(12))
    assert engine.match(request) == 0
    with silent(pool):
        engine.step(request, pages, 90)
        assert engine.scheduler.finished(request.request_id, len(pages))
        assert engine.empty_step() == set()
        assert engine.scheduler.demand_pages()
        stored = engine.empty_step()
        assert stored == {request.request_id}
        engine.scheduler.stored(stored)
        assert not engine.scheduler.demand_pages()


def test_finished_requests_keep_few_pages(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine, requests = engine_of(pool), [Request(tokens(64, seed=seed)) for seed in range(3)]
    assert [engine.match(request) for request in requests] == [0, 0, 0]
    with silent(pool):
        for number, request in enumerate(requests):  # 8 of 64 pages each
            engine.step(request, list(range(8 * number, 8 * number + 8)), 64)
            assert engine.scheduler.finished(request.request_id, 8)
        assert engine.empty_step() == {requests[0].request_id}


def test_pages_of_a_preempted_request_are_not_read(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine, request, pages = engine_of(pool), Request(tokens(90)), list(range(12))
    other = Request(tokens(40, seed=1))
    assert engine.match(request) == engine.match(other) == 0
    with silent(pool):
        engine.step(request, pages, 90)
        engine.step(other, list(range(20, 26)), 40)
        engine.empty_step(preempted=[request.request_id])
        engine.pages[:, pages] = 7  # as they are others' now
        request.num_computed_tokens = 0
    pages = list(range(30, 42))
    engine.step(request, pages, 90)
    engine.finish(request, pages)
    engine.finish(other, list(range(20, 26)))
    assert engine_of(pool).run(Request(other.all_token_ids)) == Outcome(32, 0)
    assert engine_of(pool).run(Request(request.all_token_ids)) == Outcome(88, 0)


def test_a_full_pool_is_no_error(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=8)
    prompt = tokens(64)
    keys = block_keys(prompt, 8, root_key(FINGERPRINT))
    engine = engine_of(pool)
    engine.run(Request(prompt))
    with pool.client() as client, client.lease(keys):
        assert engine.run(Request(tokens(64, seed=1))) == Outcome(0, 0)
        assert engine.run(Request(prompt)) == Outcome(56, 0)


def test_blocks_on_ssd_are_found(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=16, num_ssd_blocks=64)
    engine, prompts = engine_of(pool), [tokens(64, seed=seed) for seed in range(4)]
    for prompt in prompts:
        engine.run(Request(prompt))
    with pool.client() as client:
        assert Tier.SSD in client.exists(block_keys(prompts[0], 8, root_key(FINGERPRINT)))
    for prompt in prompts:
        assert engine_of(pool).run(Request(prompt)) == Outcome(56, 0)


def test_nothing_stays_in_use(pools: Pools, engine_of: MakeEngine) -> None:
    pool = pools.start(layout=LAYOUT, num_pages=64)
    engine, prompt = engine_of(pool), tokens(90)
    for _ in range(3):
        engine.run(Request(prompt))
    with pool.client() as client:
        until(client, lambda stats: stats.num_used == stats.num_reservations == stats.num_leases == 0)


def test_an_engine_without_a_pool_computes(engine_of: MakeEngine) -> None:
    engine = Engine(None, LAYOUT, 8)
    assert engine.run(Request(tokens(90))) == Outcome(0, 0)
    engine.close()
