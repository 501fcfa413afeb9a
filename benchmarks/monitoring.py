"""The cost of monitoring: counting, scrapes of `/metrics`, an open dashboard.

    python -m benchmarks.monitoring [--instances N] [--seconds S] [--processes N]

The Conductor's process has instances that compute nothing (`benchmarks.front.instant_workers`). Half of them
prefill. Their heartbeats report pools that have exchanged blocks with ten other pools each. 64 clients stream
answers of 64 tokens, one event for each token, one answer after the other. Then scrapes and polls of a
dashboard are measured without other load. Processor time is that of all threads of the Conductor's process,
as the kernel's scheduler counts it. A dashboard polls once a second, so the seconds until a poll is answered
are an upper bound of the share of a core that the dashboard costs. Counting is timed by itself: all that is
counted for one request is counted many times.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry

from benchmarks.front.fronts import front
from benchmarks.front.load import NUM_INPUT, NUM_OUTPUT
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.servers import ServerError
from benchmarks.tools.load.bench import find_server
from benchmarks.tools.load.clients import Clients
from benchmarks.tools.load.sources import MixSource, Run
from benchmarks.tools.traces.mixes import Mix, RequestClass
from conductor.front.metrics import Metrics, RequestOutcome
from mooncake.messages.requests import FinishReason

CONCURRENCY = 64
SCRAPE_PERIOD_S = 15.0
NUM_WATCHED = 20
MAX_SCRAPE_MS, MAX_METRICS_SHARE, MAX_DASHBOARD_SHARE = 50.0, 0.03, 0.01
_NUM_COUNTED = 5000


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time that all threads of a process have used, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def counting_s() -> float:
    """Return the seconds that counting takes for one request of `NUM_OUTPUT` tokens: the best of five."""
    metrics = Metrics(CollectorRegistry(), "model", 1.0, 0.1)
    gaps_s = [0.02] * (NUM_OUTPUT - 1)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(_NUM_COUNTED):
            metrics.choice_submitted()
            metrics.choice_started(0.1)
            metrics.tokens_received(1, None)
            for gap_s in gaps_s:
                metrics.tokens_received(1, gap_s)
            metrics.choice_ended(started=True)
            metrics.choice_finished(FinishReason.LENGTH, 1.4, 0.1, gaps_s)
            metrics.prompt_received(1000, 0)
            metrics.request_ended(RequestOutcome.FINISHED)
        best_s = min(best_s, (time.perf_counter() - began_s) / _NUM_COUNTED)
    return best_s


def streams() -> Run:
    """Return the run of streamed requests. Server and number of requests are still to be set."""
    return Run(
        source=MixSource(Mix((RequestClass(1.0, NUM_INPUT, NUM_OUTPUT),), 1.0, 1.0), 1.0),
        concurrency=CONCURRENCY,
        token_ids=(1000, 30_000),
        as_text=True,
        timeout_s=600.0,
    )


def watched(url: str, pid: int) -> tuple[list[float], float, list[float]]:
    """Scrape a server and poll its dashboard, once a second.

    Returns the seconds until each scrape was answered, the processor seconds of one scrape, and the seconds
    until each poll was answered.
    """
    with httpx.Client(base_url=url, timeout=30) as client:
        client.get("/metrics").raise_for_status()
        before_s = cpu_s(pid)
        scrapes_s = [_asked_s(client, "/metrics", {}) for _ in range(NUM_WATCHED)]
        scrape_cpu_s = (cpu_s(pid) - before_s) / NUM_WATCHED
        polls_s, etag = [], ""
        for _ in range(NUM_WATCHED):
            time.sleep(1.0)
            polls_s.append(_asked_s(client, "/dashboard/state", {"if-none-match": etag}))
            etag = client.get("/dashboard/state").headers["etag"]
    return scrapes_s, scrape_cpu_s, polls_s


def _asked_s(client: httpx.Client, path: str, headers: dict[str, str]) -> float:
    began_s = time.perf_counter()
    client.get(path, headers=headers)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.monitoring", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--instances", type=int, default=100, metavar="N", help="default: 100")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of streams; default: 15")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="clients; default: 2")
    options = parser.parse_args()
    try:
        with front(options.instances // 2) as server, Clients(options.processes) as clients:
            found = find_server(server.url, None, None)
            run = replace(streams(), url=found.url, model=found.model)
            clients.run(replace(run, num_requests=CONCURRENCY), lambda _: None)  # first calls allocate
            progress(f"{CONCURRENCY} streams")
            before_s = cpu_s(server.pid)
            result = clients.run(replace(run, duration_s=options.seconds), lambda _: None)
            request_s = (cpu_s(server.pid) - before_s) / len(result.outcomes)
            requests_per_s = len(result.outcomes) / result.wall_s
            progress("nothing but who watches")
            took_s, scrape_s, polls_s = watched(server.url, server.pid)
    except ServerError as error:
        sys.exit(str(error))
    counted_s = counting_s()
    streams_share = requests_per_s * request_s
    metrics_share = (requests_per_s * counted_s + scrape_s / SCRAPE_PERIOD_S) / streams_share
    rows = [
        ("a request", f"{1000 * request_s:.2f} ms of CPU at {requests_per_s:.0f}/s", ""),
        ("counting it", f"{1e6 * counted_s:.0f} us of CPU", ""),
        ("a scrape", f"{1000 * scrape_s:.1f} ms of CPU", ""),
        ("", f"answered after {1000 * statistics.median(took_s):.1f} ms, at most {1000 * max(took_s):.1f} ms",
         f"{MAX_SCRAPE_MS:.0f} ms"),
        (f"counting, and a scrape every {SCRAPE_PERIOD_S:.0f} s", f"{metrics_share:.2%} of the streams' CPU",
         f"{MAX_METRICS_SHARE:.0%}"),
        ("an open dashboard", f"at most {statistics.mean(polls_s):.2%} of a core",
         f"{MAX_DASHBOARD_SHARE:.0%}"),
    ]  # fmt: skip
    title = f"Monitoring: {options.instances} instances, {CONCURRENCY} streams"
    print_table(title, ("", "", "bar"), rows, "")


if __name__ == "__main__":
    main()
