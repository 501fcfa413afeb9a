"""A real cluster of two prefill and two decode instances under more load than it can take, through HTTP.

    python -m benchmarks.overload [--only excess|swing] [--rates N,N,...] [--seconds N] [--picture FILE]
                                  [mooncake-serve flags]

The workers compute a tiny model, but take the time of a larger one for each pass (0.25 ms a prompt token; 20
ms a decode step and 1 ms for each request). So the instances do not compete for the machine's cores. Prompts
have 512 random tokens, answers 200, and arrive in an open loop. Decode is the bottleneck and takes longer
than prefill. In this situation early rejection swings (Mooncake, section 7.3). The cluster has SLOs of 4 s
for TTFT and 60 ms for TBT. A request counts as effective within 1.5 times these SLOs, because TBT is measured
as the mean of the longest tenth of a request's gaps, but predicted for a step.

`excess`: goodput by rate, up to three times the rate with the best goodput. The table also has the time to
the 429 of requests that are rejected at arrival, as the clients and as the server measure it. `swing`: the
standard deviation of (prefill load - decode load) under early rejection and under prediction, and a picture.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.kvstore.rounds import progress
from benchmarks.overload.rejections import Rejections, rejections, servers_histogram
from benchmarks.overload.sampling import LoadSampler, swing
from benchmarks.overload.slowed import VOCAB_SIZE
from benchmarks.servers import ServerError, free_port, serving, telling_why
from benchmarks.tools.load.bench import find_server
from benchmarks.tools.load.clients import Clients
from benchmarks.tools.load.measures import Slo, Summary, summarize
from benchmarks.tools.load.outcomes import Kind
from benchmarks.tools.load.sources import MixSource, Run
from benchmarks.tools.traces.mixes import Mix, RequestClass
from mooncake.config.policies import Overload

NUM_INPUT, NUM_OUTPUT = 512, 200
TOLD_TTFT_S, TOLD_TBT_S = 4.0, 0.06
SLO = Slo(ttft_s=1.5 * TOLD_TTFT_S, tbt_s=1.5 * TOLD_TBT_S, long_from=NUM_INPUT)
MIX = Mix((RequestClass(1.0, NUM_INPUT, NUM_OUTPUT),), SLO.ttft_s, SLO.tbt_s)
OVERLOAD = 3.0
"""The rate of the overload, as a multiple of the rate with the best goodput."""
MIN_GOODPUT, MAX_REJECTION_S, MIN_DAMPING = 0.9, 0.05, 0.3
"""The limits (*bars*): the least share of the best goodput, the longest time to a 429, the least damping.

The damping is the share by which prediction reduces the standard deviation of (prefill load - decode load).
"""
WARM_UP_S = 15.0
"""Seconds of a warm-up. Before it the durations of decodes are unknown."""


class Overloaded(NamedTuple):
    """One run: its summary, its rejections, and the loads over time."""

    summary: Summary
    rejections: Rejections
    loads: "np.ndarray[Any, Any]"


@contextlib.contextmanager
def cluster(policy: Overload, flags: Sequence[str], log: int) -> Iterator[str]:
    """Start a cluster with a policy. The context gets its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.overload.slowed", folder, f"--port={port}"]
        command += ["--num-prefill=2", "--num-decode=2", "--worker-max-batch=64"]
        command += ["--kvcache-pool-bytes=64MiB"]
        command += ["--kvcache-device-bytes=64MiB", f"--conductor-overload={policy.value}"]
        command += [f"--conductor-ttft-slo-s={TOLD_TTFT_S}", f"--conductor-tbt-slo-s={TOLD_TBT_S}"]
        with serving([*command, *flags], f"{url}/ready", output=log):
            yield url


def under_load(clients: Clients, url: str, rate_per_s: float, seconds: float, seed: int) -> Overloaded:
    """Run one open loop until all its requests have ended."""
    run = Run(
        url=url,
        model=find_server(url, None, None).model,
        source=MixSource(MIX, burstiness=1.0),
        rate_per_s=rate_per_s,
        seed=seed,
        duration_s=seconds,
        token_ids=(0, VOCAB_SIZE),
        timeout_s=120.0,
    )
    before = servers_histogram(url)
    with LoadSampler(url) as sampler:
        result = clients.run(run, lambda _: None)
    failed = [outcome.error for outcome in result.outcomes if outcome.kind is Kind.FAILED]
    if failed:
        progress(f"{len(failed)} requests failed: {failed[0]}")
    rejected = rejections(result.outcomes, before, servers_histogram(url))
    return Overloaded(summarize(result, SLO), rejected, sampler.rows)


def measure_excess(
    clients: Clients, rates: Sequence[float], seconds: float, flags: list[str], log: int
) -> bool:
    """Measure loads up to the overload, and print the table.

    Returns whether goodput and the time to a 429 are within their limits, and no request has failed.
    """
    print(
        "| offered, req/s | goodput, req/s | finished | failed | 429 when prefill has ended | 429 at arrival"
        " | p50 | p99 | most | by the server, p50 | p99 | most |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    goodputs: dict[float, float] = {}
    with cluster(Overload.PREDICTION, flags, log) as url:
        under_load(clients, url, max(rates), WARM_UP_S, seed=0)
        for seed, rate in enumerate([*rates, None], 1):
            best = max(goodputs, key=goodputs.__getitem__) if rate is None else 0.0
            offered = OVERLOAD * best if rate is None else rate
            run = under_load(clients, url, offered, seconds, seed)
            goodputs.setdefault(offered, run.summary.goodput_per_s)
            print(_row(offered, run), flush=True)
    goodput, most_s = run.summary.goodput_per_s, max(run.rejections.at_arrival_s, default=0.0)
    share = goodput / goodputs[best]
    print(
        f"\nat {OVERLOAD:g} times the best rate: {share:.0%} of the best goodput (bar {MIN_GOODPUT:.0%}), the"
        f" slowest 429 after {1000 * most_s:.0f} ms (bar {1000 * MAX_REJECTION_S:.0f} ms); the client sent"
        f" {_lag(run.summary)}"
    )
    return share >= MIN_GOODPUT and most_s < MAX_REJECTION_S and run.summary.num_failed == 0


def _lag(summary: Summary) -> str:
    lag_s = summary.client.lag_s
    return "nothing" if lag_s is None else f"up to {1000 * lag_s.max:.0f} ms late"


def _row(offered: float, run: Overloaded) -> str:
    s = run.summary
    rejected = run.rejections
    times = [f"{1000 * time_s:.0f} ms" for time_s in rejected.percentiles_s()] or ["", "", ""]
    for share in (0.5, 0.99, 1.0):
        bound_s = rejected.servers_bound_s(share)
        times.append("" if bound_s is None else f"< {1000 * bound_s:g} ms")
    counts = f"{s.num_finished} | {s.num_failed} | {len(rejected.later_s)} | {len(rejected.at_arrival_s)}"
    return f"| {offered:.1f} | {s.goodput_per_s:.2f} | {counts} | {' | '.join(times)} |"


def measure_swing(
    clients: Clients, rate: float, seconds: float, flags: list[str], log: int, picture: Path | None
) -> bool:
    """Measure the swing of the load under early rejection and under prediction, and print the table.

    Draws the picture if `picture` is given. Returns whether prediction reduces the swing by at least
    `MIN_DAMPING`.
    """
    print("| policy | std of (prefill - decode load) | of prefill | of decode | goodput, req/s | rejected |")
    print("|---|---|---|---|---|---|", flush=True)
    runs: dict[Overload, Overloaded] = {}
    for policy in (Overload.EARLY_REJECTION, Overload.PREDICTION):
        progress(policy.value)
        with cluster(policy, flags, log) as url:
            runs[policy] = run = under_load(clients, url, rate, seconds, seed=1)
        loads = run.loads[(run.loads[:, 0] >= WARM_UP_S) & (run.loads[:, 0] < seconds)]
        s = run.summary
        print(
            f"| {policy.value} | {swing(run.loads, WARM_UP_S, seconds):.3f} | {loads[:, 1].std():.3f}"
            f" | {loads[:, 2].std():.3f} | {s.goodput_per_s:.2f} | {s.num_rejected} |",
            flush=True,
        )
    before, after = (swing(run.loads, WARM_UP_S, seconds) for run in runs.values())
    print(f"\nprediction damps the swing by {1 - after / before:.0%} (bar {MIN_DAMPING:.0%})")
    if picture is not None:
        draw(runs, seconds, picture)
    return 1 - after / before >= MIN_DAMPING


def draw(runs: dict[Overload, Overloaded], seconds: float, path: Path) -> None:
    """Draw both loads over time, like the paper's Figures 9 and 10."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.4 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, squeeze=False, sharey=True)[:, 0]
    for panel, (policy, run) in zip(panels, runs.items(), strict=True):
        panel.plot(run.loads[:, 0], run.loads[:, 1], color="tab:green", label="prefill load")
        panel.plot(run.loads[:, 0], run.loads[:, 2], color="tab:orange", label="decode load")
        panel.set(title=policy.value, xlim=(0, seconds), ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("seconds")
    panels[0].legend(fontsize="small", loc="upper right")
    figure.savefig(path)


def main() -> None:
    """Run the measurements that the command line names.

    Exit with 1 if a figure misses its limit (its *bar*).
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overload",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", choices=["excess", "swing"])
    parser.add_argument("--rates", default="4,5,6,7,8", help="excess: requests a second that are offered")
    parser.add_argument("--rate", type=float, default=20.0, help="swing: requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests come, each time")
    parser.add_argument("--picture", type=Path, help="swing: where to draw the loads")
    arguments, flags = parser.parse_known_args()
    rates = [float(rate) for rate in arguments.rates.split(",")]
    is_met = True
    with Clients(1) as clients, telling_why(ServerError) as log:
        if arguments.only != "swing":
            is_met &= measure_excess(clients, rates, arguments.seconds, flags, log)
        if arguments.only != "excess":
            is_met &= measure_swing(clients, arguments.rate, arguments.seconds, flags, log, arguments.picture)
    if not is_met:
        sys.exit("a bar is not met")


if __name__ == "__main__":
    main()
