"""Small loads and clusters for tests of the simulator."""

import random

from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.request import BLOCK_TOKENS, TraceRequest

SMALL = Setup(model="llama-3.1-8b", num_gpus=1, num_prefill=2, num_decode=2, pool_tokens=400 * BLOCK_TOKENS)


def conversations(num_requests: int, rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Return requests of which half continue the prompt of an earlier request."""
    rng = random.Random(seed)
    next_id, arrival_s = 0, 0.0
    load: list[TraceRequest] = []
    for _ in range(num_requests):
        arrival_s += rng.expovariate(rate_per_s)
        ids: tuple[int, ...] = ()
        if load and rng.random() < 0.5:
            earlier = rng.choice(load[-20:])
            ids = earlier.hash_ids[: earlier.num_input_tokens // BLOCK_TOKENS]
        num_new = rng.randrange(1, 8 * BLOCK_TOKENS)
        num_tokens = len(ids) * BLOCK_TOKENS + num_new
        num_ids = -(-num_tokens // BLOCK_TOKENS) - len(ids)
        ids += tuple(range(next_id, next_id + num_ids))
        next_id += num_ids
        load.append(TraceRequest(arrival_s, num_tokens, rng.randrange(1, 200), ids))
    return load
