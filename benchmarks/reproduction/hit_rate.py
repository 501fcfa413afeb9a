"""Hit rate of one pool by policy and capacity: Mooncake, Table 1 (arXiv)."""

from pathlib import Path

from benchmarks.hit_rate import read_trace, replay
from benchmarks.reproduction.experiment import Experiment, Outcome, Table, Trace
from mooncake.config import EvictionPolicy

CAPACITIES = (100_000, 50_000, 30_000, 10_000, 1_000)
PUBLISHED = {
    EvictionPolicy.LRU: (0.51, 0.50, 0.48, 0.40, 0.30),
    EvictionPolicy.LFU: (0.51, 0.49, 0.43, 0.35, 0.30),
    EvictionPolicy.LENGTH_AWARE: (0.50, 0.48, 0.42, 0.35, 0.30),
}


def run(trace: Trace, folder: Path) -> Outcome:
    """Two rows a policy."""
    prompts = read_trace(trace.path)
    most = 2 * len({key for prompt in prompts for key in prompt.keys})
    unlimited = replay(prompts, EvictionPolicy.LRU, most).blocks
    rows: list[list[str | float | None]] = []
    for policy, published in PUBLISHED.items():
        ours = [replay(prompts, policy, capacity).blocks for capacity in CAPACITIES]
        rows.append([f"{policy}, published", 0.51, *published])
        rows.append([f"{policy}, ours", unlimited, *ours])
    return Outcome([Table(["hit rate of blocks", "unlimited", *(f"{c:,}" for c in CAPACITIES)], rows)])


EXPERIMENT = Experiment(
    "hit_rate",
    "Hit rate by eviction policy and capacity",
    "Mooncake (arXiv), Table 1: one global pool, capacities in blocks of 512 tokens.",
    "The pool's own code with pages without bytes (`benchmarks/hit_rate.py`). The published trace is"
    " another one"
    " (23,608 requests); ours is the conversation trace of the FAST'25 version (12,031 requests).",
    "The order of the policies is the published one wherever capacity is scarce but not tiny: LRU, then "
    "LFU, then LengthAware. The levels are lower: this trace repeats fewer of its blocks (36.6% with "
    "unlimited capacity), and has no hot blocks that would carry a pool of 1,000.",
    run,
)
