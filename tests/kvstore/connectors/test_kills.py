"""Engines and messengers are killed at any moment: no page holds what it should not, none stays in use."""

import contextlib
import os
import random
import threading
from pathlib import Path

from kvstore.client.client import KVCachePool
from mooncake.messages.blocks import KVLayout
from tests.deadline import DEADLINE_S
from tests.forked import Forked
from tests.kvstore.connectors.engine import Engine, Request
from tests.kvstore.nodes import FINGERPRINT
from tests.kvstore.pools import Pools, nothing_reserved, until

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=8, dtype="float32")
NUM_ROUNDS, PER_ROUND = 8, 5


def prompt(draw: random.Random) -> list[int]:
    """One of a hundred, of which many begin alike."""
    shared, rest = random.Random(draw.randrange(10)), random.Random(draw.randrange(10))
    return [*shared.choices(range(50000), k=40), *rest.choices(range(50000), k=45)]


def compute(pool: KVCachePool, draw: random.Random, num_requests: int) -> int:
    """Compute requests, whose pages are checked; how many tokens were found."""
    with contextlib.closing(Engine(pool, LAYOUT, draw.choice([4, 8, 16]), num_pages=128)) as engine:
        return sum(
            engine.run(Request(prompt(draw)), chunk=draw.randrange(1, 60)).num_matched
            for _ in range(num_requests)
        )


def compute_until_killed(address: str, seed: int) -> None:
    with KVCachePool.connect(address, fingerprint=FINGERPRINT, layout=LAYOUT, timeout_s=DEADLINE_S) as pool:
        while True:
            compute(pool, random.Random(seed), 20)
            seed += 1


def test_nothing_is_wrong_or_stays_in_use(short_tmp_path: Path) -> None:
    draw = random.Random(27)
    with Pools(short_tmp_path) as pools, open(os.devnull, "r+b") as nothing:
        pool = pools.start(layout=LAYOUT, num_pages=64)
        num_found = 0
        for _ in range(NUM_ROUNDS):
            other = Forked(
                compute_until_killed,
                pool.unix,
                draw.randrange(1 << 30),
                stdin=nothing.fileno(),
                stdout=nothing.fileno(),
                stderr=2,
                environ=dict(os.environ),
            )
            with pool.client() as client:
                killing = threading.Timer(draw.random() / 2, pool.kill)
                killing.start()
                num_found += compute(client, draw, PER_ROUND)
                killing.join(DEADLINE_S)
                other.kill()
                other.wait(DEADLINE_S)
                pool.start()
                pool.ready()
                num_found += compute(client, draw, PER_ROUND)
        assert num_found > 0
        with pool.client() as client:
            until(client, lambda stats: nothing_reserved(stats) and stats.num_used == 0)
