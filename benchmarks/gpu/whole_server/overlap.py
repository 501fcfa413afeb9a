"""The cost of layer-wise prefill's stores during the computation, and the time that loads save.

The model is a quarter of a large model's layers. The executor runs in this process, and a pool's process runs
beside it.

Owns: the ways that are compared, their limits. Does not know: how a prefill is run
(`benchmarks.prefill.bench`).
"""

import asyncio
import statistics
from dataclasses import replace

from benchmarks.prefill.bench import Bench, Setup, instances
from benchmarks.report import Found, Report
from mooncake.messages.blocks import KVDtype
from workers.engine.spec import ModelSpec

MOST_EXTRA = 0.05
"""The most time that stores may add to a prefill, as a share of the computation's time."""
NUM_ROUNDS = 5


def measure_overlap(report: Report, spec: ModelSpec, dtype: KVDtype, device: str, prompt_len: int) -> None:
    """Measure prefills alone, with stores, with loads, and without overlap.

    Adds two rows to `report`: one for stores, one for loads. If the measurement fails, adds one row with the
    error.
    """
    block_size, chunk = 64, 2048
    num_pages = 2 * -(-prompt_len // block_size) + 8
    setup = Setup(
        replace(spec, num_layers=max(1, spec.num_layers // 4)), block_size, chunk, num_pages, dtype, device
    )
    try:
        found = asyncio.run(_compared(setup, prompt_len))
    except Exception as error:  # noqa: BLE001 - the other checks have been made, and their report is kept
        found = {"layer-wise prefill": Found(False, repr(error)[:600])}
    for name, of_name in found.items():
        report.check(name, lambda of_name=of_name: of_name)  # type: ignore[misc]


async def _compared(setup: Setup, prompt_len: int) -> dict[str, Found]:
    async with instances(setup) as (pool, _):
        bench = Bench(pool, setup=setup)
        times: dict[str, list[float]] = {"alone": [], "beside": [], "hit": [], "behind": []}
        # All full blocks of the prompt are cached. The last token is always computed.
        num_cached = min(prompt_len // setup.block_size * setup.block_size, prompt_len - 1)
        for _ in range(NUM_ROUNDS + 1):
            first, prompt, *others = (bench.new_prompt(prompt_len) for _ in range(4))
            alone = await bench.prefills_s([first, prompt], bench.no_transfers())
            beside = await bench.prefills_s([first, prompt], bench.transfers())
            hit = await bench.prefills_s([prompt, prompt], bench.transfers(), num_cached_tokens=num_cached)
            behind = await bench.prefills_s(others, bench.transfers(overlap=False))
            for name, (_, of_second_s) in zip(times, (alone, beside, hit, behind), strict=True):
                times[name].append(of_second_s)
    # The first round compiles and allocates. The first prompt of each way starts its transfers' threads.
    alone_s, beside_s, hit_s, behind_s = (statistics.median(of[1:]) for of in times.values())
    extra = beside_s / alone_s - 1
    title = f"{prompt_len} tokens through {setup.spec.num_layers} layers"
    return {
        f"{title}, stored layer by layer": Found(
            extra <= MOST_EXTRA,
            f"{1e3 * alone_s:.1f} ms alone, {1e3 * beside_s:.1f} ms with stores beside ({extra:+.1%}, bar"
            f" {MOST_EXTRA:+.0%}), {1e3 * behind_s:.1f} ms without overlap ({behind_s / alone_s - 1:+.1%})",
        ),
        f"{title}, loaded from DRAM": Found(
            hit_s < alone_s, f"{1e3 * hit_s:.1f} ms, {hit_s / alone_s:.0%} of the computation"
        ),
    }
