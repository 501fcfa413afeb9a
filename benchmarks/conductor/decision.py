"""The time of a whole decision of the Conductor, by number of instances: match, Algorithm 1, overload.

    python -m benchmarks.conductor.decision NUM_INSTANCES NUM_BLOCKS      (one size, one JSON line)

Half of the instances prefill, and half decode. Prompts, and the instances that hold their blocks, are those
of the index's benchmark. Every instance has requests, and both SLOs are set. Usually the TBT SLO is met even
if all known work is decoded at once, so no forecast is needed. A check that needs the forecast has a column
of its own. The table has wall time and the thread's CPU time: a difference between the two is the work of
other processes.

Owns: this workload, its table. Does not know: how a decision is made.
"""

import json
import random
import statistics
import subprocess
import sys
import time

from benchmarks.conductor.index import (
    NUM_BLOCKS,
    NUM_INSTANCES,
    NUM_MATCHES,
    PROMPT_BLOCKS,
    fill,
    keys_of_prompt,
)
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.tools.arguments import counts
from conductor.admission.overload import Admission
from conductor.scheduling.native import new_scheduler
from conductor.settings import PolicySettings, SLOs
from conductor.view.assignments import Assignments
from conductor.view.cluster_view import ClusterView
from conductor.view.decision_stats import DecisionStats
from conductor.view.instances import Instance
from mooncake.config.policies import Overload
from mooncake.messages.blocks import BlockKey, KVLayout
from mooncake.messages.pools import Capacity, MessengerAddress, PoolShard
from mooncake.messages.requests import Request, SamplingParams
from mooncake.messages.workers import PROTOCOL_VERSION, Register, Role

BARS_US = {16: 50, 100: 80, 1000: 200}
P99_FACTOR = 3
BLOCK_SIZE = 256
LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=BLOCK_SIZE, dtype="bfloat16")
REQUESTS_PER_INSTANCE = 8
NUM_ENDED = 64
"""The number of requests that are decoded to their end before the measurement."""
SLOS, TIGHT_SLOS = SLOs(ttft_s=30.0, tbt_s=0.1), SLOs(ttft_s=30.0, tbt_s=1e-6)
_SEED = 7


def instance(number: int) -> Instance:
    """Return an instance for prefill if `number` is even, for decode if it is odd."""
    name = f"p{number}"
    role = Role.DECODE if number % 2 else Role.PREFILL
    shard = PoolShard(MessengerAddress(name, 1, "host", "/path", ()), LAYOUT)
    capacity = Capacity(100_000, 100_000, 256)
    register = Register(PROTOCOL_VERSION, name, 1, role, "model", LAYOUT, (shard,), capacity, "cuda")
    return Instance(register, name.encode(), last_seen_s=0.0)


def request(name: str, keys: list[BlockKey]) -> Request:
    """Return a request whose blocks have these keys."""
    return Request(name, [1] * (BLOCK_SIZE * len(keys) + 1), keys, SamplingParams(200), "front")


def measure(num_instances: int, num_blocks: int) -> dict[str, float]:
    """Measure one size in this process, and return the times in microseconds."""
    settings = PolicySettings(overload=Overload.PREDICTION)
    view = ClusterView(settings)
    for number in range(num_instances):
        view.add(instance(number), 0.0)
    num_prompts = fill(view.prefixes, num_instances, num_blocks, are_added=True)
    scheduler = new_scheduler(view, settings)
    admission = Admission(view, settings.overload)
    assignments = Assignments(view, settings, DecisionStats())
    draw = random.Random(_SEED)
    for number in range(-NUM_ENDED, REQUESTS_PER_INSTANCE * num_instances):
        asked = request(f"r{number}", keys_of_prompt(draw.randrange(num_prompts)))
        placement = scheduler.schedule(asked, 0.0)
        assert placement is not None
        assignment = assignments.assign(asked, placement, SLOS, 0.0)
        assignments.order_prefill(assignment, 0, None, 0.0)
        if number < 0 or number % 2:
            assignments.end_prefill(assignment, 0.5, 0)
        if number < 0:
            assignments.end_decode(assignment, 0.5 - 0.01 * number, 200)
            assignments.release(assignment, 0.5)
    wall_s, cpu_s, with_forecast_s = [], [], []
    for prompt in draw.choices(range(num_prompts), k=NUM_MATCHES):
        asked = request("r", keys_of_prompt(prompt))
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        placement = scheduler.schedule(asked, 1.0)
        assert placement is not None
        admission.check_arrival(asked, placement, SLOS, 0.0, 1.0)
        cpu_s.append(time.thread_time() - started_cpu_s)
        wall_s.append(time.perf_counter() - started_s)
        started_cpu_s = time.thread_time()
        admission.check_arrival(asked, placement, TIGHT_SLOS, 0.0, 1.0)
        with_forecast_s.append(time.thread_time() - started_cpu_s)
    figures = {"forecast_p50": 1e6 * statistics.median(with_forecast_s)}
    for clock, times_s in (("wall", sorted(wall_s)), ("cpu", sorted(cpu_s))):
        figures[f"{clock}_p50"] = 1e6 * statistics.median(times_s)
        figures[f"{clock}_p99"] = 1e6 * times_s[int(0.99 * len(times_s))]
    return figures


def report(is_full: bool) -> None:
    """Print the table. Each size is measured in a process of its own."""
    del is_full  # blocks hardly matter: the index's table has them
    num_blocks = NUM_BLOCKS[-1]
    rows = []
    for num_instances in NUM_INSTANCES:
        progress(f"decision: {num_instances} instances")
        command = [sys.executable, "-m", __spec__.name, str(num_instances), str(num_blocks)]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        bar_us = BARS_US[num_instances]
        rows.append(
            [
                str(num_instances),
                f"{figures['cpu_p50']:.0f} / {figures['wall_p50']:.0f} us",
                f"{bar_us} us",
                f"{figures['cpu_p99']:.0f} / {figures['wall_p99']:.0f} us",
                f"{P99_FACTOR * bar_us} us",
                f"{figures['forecast_p50']:.0f} us",
            ]
        )
    print_table(
        f"Decision: a prompt of {PROMPT_BLOCKS} blocks, {num_blocks:,} blocks in the index",
        ["instances", "p50, CPU / wall", "bar", "p99, CPU / wall", "bar", "the check with a forecast"],
        rows,
    )


if __name__ == "__main__":
    print(json.dumps(measure(*counts(__spec__.name, "NUM_INSTANCES", "NUM_BLOCKS"))))
