"""Pipelines of several stages, compared with one stage. Each stage has one core.

Owns: the comparison, its table, limits and timeline. Does not know: how a prefill is run.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.prefill.group import Rig, rig_of
from benchmarks.prefill.timeline import Computed, draw, passes_of, write_chrome_trace

SIZES = (128, 1024, 4096, 8160)
MIN_SPEEDUP = {4096: 1.7, 8160: 1.8}
MIN_OF_BOUND = 0.92
MAX_EXTRA, SHORT = 0.03, 128
SHORT_ROUNDS = 40
"""The number of prompts of `SHORT` tokens in each round. It is large, as each prompt takes little time."""


class Measured:
    """The seconds of prefills by number of stages, and the passes of the last prompt of each."""

    def __init__(self) -> None:
        self.times: defaultdict[int, list[float]] = defaultdict(list)
        self.passes: dict[int, list[Computed]] = {}

    def median_s(self, num_stages: int) -> float:
        return statistics.median(self.times[num_stages])


async def measure_size(rig: Rig, num_tokens: int, num_rounds: int, rng: random.Random) -> Measured:
    """Measure one stage and several stages in turn, with prompts of one size."""
    measured = Measured()
    for number in range(num_rounds * (SHORT_ROUNDS if num_tokens == SHORT else 1)):
        order = sorted(rig.instances, reverse=bool(number % 2))
        for num_stages in order:
            rig.trace_file.write_text("")
            tokens = [rng.randrange(1000, 40000) for _ in range(num_tokens)]
            measured.times[num_stages].append(await rig.prefill_s(num_stages, tokens))
            measured.passes[num_stages] = passes_of(rig.trace_file.read_text().splitlines())
    return measured


async def pipeline(num_stages: int, num_rounds: int, sizes: Sequence[int], chunks: str, folder: Path) -> bool:
    """Measure all sizes. Returns whether all speedups are within their limits.

    Timelines are written to `folder`.
    """
    rng = random.Random(0)
    is_met = True
    print(f"| tokens | one stage | {num_stages} stages, {chunks} chunks | speedup | chunks | of the bound |")
    print("|---|---|---|---|---|---|", flush=True)
    async with rig_of([1, num_stages], chunks) as rig:
        for count in rig.instances:
            await rig.prefill_s(
                count, [rng.randrange(1000, 40000) for _ in range(1024)]
            )  # first calls allocate
        for num_tokens in sizes:
            measured = await measure_size(rig, num_tokens, num_rounds, rng)
            one_s, split_s = measured.median_s(1), measured.median_s(num_stages)
            speedup = one_s / split_s
            num_chunks = len({p.start for p in measured.passes[num_stages]})
            bound = num_stages * num_chunks / (num_chunks + num_stages - 1)
            bars = []
            if num_tokens == SHORT:
                is_met &= split_s <= (1 + MAX_EXTRA) * one_s
                bars.append(f"{split_s / one_s - 1:+.1%}, bar {MAX_EXTRA:+.0%}")
            if num_tokens in MIN_SPEEDUP and num_stages == 2:
                is_met &= speedup >= MIN_SPEEDUP[num_tokens] and speedup >= MIN_OF_BOUND * bound
                bars.append(f"bar {MIN_SPEEDUP[num_tokens]}")
            is_cut = num_chunks > 1
            of_bound = f"{speedup / bound:.0%} of {bound:.2f} (bar {MIN_OF_BOUND:.0%})" if is_cut else ""
            print(
                f"| {num_tokens} | {one_s:.3f} s | {split_s:.3f} s | {speedup:.2f}"
                f"{' (' + '; '.join(bars) + ')' if bars else ''} | {num_chunks} | {of_bound} |",
                flush=True,
            )
            name = folder / f"pipeline-{num_stages}-{num_tokens}"
            write_chrome_trace(measured.passes[num_stages], name.with_suffix(".json"))
            title = f"{num_tokens} tokens, {num_stages} stages: {split_s:.2f} s, one stage {one_s:.2f} s"
            draw(measured.passes[num_stages], title, name.with_suffix(".svg"))
    return is_met
