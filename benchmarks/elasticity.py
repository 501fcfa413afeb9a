"""A real cluster under a changing load, with fixed or changing numbers of prefill and decode instances.

    python -m benchmarks.elasticity [--only swing,steady,switch,drain] [--sides NAME;...] [--seconds N]
                                    [--cycles N] [--load X] [mooncake-serve flags]

The workers compute a tiny model, but take the time of a larger one for each pass (`benchmarks.overload`: 0.25
ms a prompt token; 20 ms a decode step and 1 ms for each request). So four instances do not compete for the
machine's cores.

`swing`: the load changes every `--seconds` between long prompts with short answers (1,500 and 30 tokens, 8
requests/s) and short prompts with long answers (150 and 300 tokens, 6 requests/s). Both rates are multiplied
by `--load`. The table has the goodput of fixed divisions of the instances, with and without inlining. It also
has the goodput of a division that the Conductor changes, with the numbers of switches and migrations.
`steady`: both loads at half their rates, all the time. `switch`: a decode instance with 8 running streams
becomes a prefill instance. The table has the seconds from the order until the instance has computed its first
prompt. `drain`: an instance with 32 running streams leaves. The table has the seconds until the instance has
left, and the number of answers that differ from the answers of a quiet cluster. In a model with random
weights logits are nearly equal, so the batch alone can change an answer: the table also has the number of
answers that differ between two quiet runs.
"""

import argparse
import contextlib
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.overload.slowed import VOCAB_SIZE
from benchmarks.servers import ServerError, free_port, serving, telling_why
from benchmarks.tools.arguments import count
from benchmarks.tools.load.bench import find_server
from benchmarks.tools.load.clients import Clients
from benchmarks.tools.load.measures import Slo, Summary, summarize
from benchmarks.tools.load.sources import PhasesSource, Run
from benchmarks.tools.traces.phases import Phase

TOLD_TTFT_S, TOLD_TBT_S = 4.0, 0.06
SLO = Slo(ttft_s=1.5 * TOLD_TTFT_S, tbt_s=1.5 * TOLD_TBT_S, long_from=1000)
"""The SLOs of an effective request, as in `benchmarks.overload`."""
PROMPTS_PER_S, ANSWERS_PER_S = 8.0, 6.0
FIXED = "--conductor-rebalancing=false"
NO_INLINING = "--conductor-inlining=false"
SIDES = {
    "1P+3D": ("--num-prefill=1", "--num-decode=3", FIXED),
    "2P+2D": ("--num-prefill=2", "--num-decode=2", FIXED),
    "3P+1D": ("--num-prefill=3", "--num-decode=1", FIXED),
    "1P+3D, strict": ("--num-prefill=1", "--num-decode=3", FIXED, NO_INLINING),
    "2P+2D, strict": ("--num-prefill=2", "--num-decode=2", FIXED, NO_INLINING),
    "3P+1D, strict": ("--num-prefill=3", "--num-decode=1", FIXED, NO_INLINING),
    "4 both": ("--num-both=4", FIXED),
    "2P+2D, rebalanced": ("--num-prefill=2", "--num-decode=2", "--conductor-rebalancing=true"),
}
WARM_UP = (Phase(8.0, 3.0, 500, 50),)


def swinging(seconds: float, load: float) -> tuple[Phase, ...]:
    """Return the phases of a load that swings between long prompts and long answers.

    `seconds`: the length of a phase. If phases take only about a second, the Conductor does not follow them,
    and sees both loads at the same time.
    """
    return (Phase(seconds, load * PROMPTS_PER_S, 1500, 30), Phase(seconds, load * ANSWERS_PER_S, 150, 300))


@contextlib.contextmanager
def cluster(flags: Sequence[str], output: int) -> Iterator[str]:
    """Make a context with a cluster. The context gets the cluster's URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.overload.slowed", folder, f"--port={port}"]
        command += ["--worker-max-batch=64", "--kvcache-pool-bytes=128MiB", "--kvcache-device-bytes=128MiB"]
        command += [f"--conductor-ttft-slo-s={TOLD_TTFT_S}", f"--conductor-tbt-slo-s={TOLD_TBT_S}"]
        with serving([*command, *flags], f"{url}/ready", output=output):
            yield url


def under_load(
    clients: Clients, url: str, phases: tuple[Phase, ...], duration_s: float, seed: int
) -> Summary:
    """Run one open loop of these phases until all its requests have ended."""
    run = Run(
        url=url,
        model=find_server(url, None, None).model,
        source=PhasesSource(phases),
        seed=seed,
        duration_s=duration_s,
        token_ids=(0, VOCAB_SIZE),
        timeout_s=120.0,
    )
    return summarize(clients.run(run, lambda _: None), SLO)


def total(url: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have all these labels."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def compare(
    title: str,
    phases: tuple[Phase, ...],
    duration_s: float,
    sides: Sequence[str],
    flags: list[str],
    output: int,
) -> None:
    """Measure these sides under one load, and print a table."""
    rows = []
    with Clients(num_processes=1) as clients:
        for name in sides:
            progress(f"{title}: {name}")
            with cluster([*SIDES[name], *flags], output) as url:
                under_load(clients, url, WARM_UP, 8.0, seed=0)
                summary = under_load(clients, url, phases, duration_s, seed=1)
                switches = total(url, "mooncake_role_switches_total")
                moves = total(url, "mooncake_migrations_total", outcome="moved")
            rows.append((name, *_cells(summary), f"{switches:.0f}", f"{moves:.0f}"))
    columns = ("", "goodput", "offered", "rejected", "failed", "TTFT p90", "TBT p90", "switches", "moves")
    print_table(title, columns, rows)


def _cells(summary: Summary) -> list[str]:
    ttft_s, tbt_s = summary.ttft_s, summary.tbt_s
    assert ttft_s is not None
    assert tbt_s is not None
    return [
        f"{summary.goodput_per_s:.2f}",
        f"{summary.offered_per_s:.2f}",
        f"{summary.num_rejected / summary.num_requests:.0%}",
        f"{summary.num_failed}",
        f"{ttft_s.p90:.2f} s",
        f"{1000 * tbt_s.p90:.0f} ms",
    ]


# -- operators' orders --------------------------------------------------------------------------------


class Streams:
    """Streamed answers that run at the same time, with their texts and longest gaps as results."""

    def __init__(self, url: str, model: str, num_streams: int, num_tokens: int) -> None:
        self._url, self._model, self._num_tokens = url, model, num_tokens
        self._threads = ThreadPoolExecutor(num_streams)
        self._all_run = threading.Semaphore(0)
        self._num_streams = num_streams
        self._results = [self._threads.submit(self._stream, index) for index in range(num_streams)]

    def wait_until_running(self) -> None:
        """Wait until each stream has got a few tokens."""
        for _ in range(self._num_streams):
            self._all_run.acquire()

    def results(self) -> list["StreamResult"]:
        """Wait until all streams have ended, and return their results."""
        return [result.result() for result in self._results]

    def _stream(self, index: int) -> "StreamResult":
        body = {
            "model": self._model,
            "prompt": [index % VOCAB_SIZE, *range(100)],
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text, times_s = "", list[float]()
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    times_s.append(time.monotonic())
                    choices = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]
                    text += "".join(choice["text"] for choice in choices)
                if len(times_s) == 5:
                    self._all_run.release()
        gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
        return StreamResult(text, max(gaps_s, default=0.0))


class StreamResult(NamedTuple):
    """The text of a stream, and its longest gap between tokens."""

    text: str
    longest_gap_s: float


LENIENT = "--conductor-tbt-slo-s=0.2"
"""A TBT SLO that is long enough for one instance to take the streams of two."""
ORDER_FLAGS = ("--num-prefill=1", "--num-decode=2", FIXED, NO_INLINING, LENIENT)


def _num_requests(url: str, instance: str) -> int:
    """Return the number of requests that the Conductor counts at an instance."""
    instances = httpx.get(f"{url}/dashboard/state").json()["instances"]
    return sum(shown["num_requests"] for shown in instances if shown["name"] == instance)


def _has_computed(url: str, instance: str) -> bool:
    """Return whether this instance has computed the prompt of any ended request."""
    requests = httpx.get(f"{url}/dashboard/state").json()["requests"]
    return any(shown["prefill"] == instance for shown in requests if shown["is_over"])


def _ask_for_prompts(url: str, model: str, number: int) -> None:
    """Send a few prompts at once. They share no prefix with prompts of another `number`."""

    def ask(index: int) -> None:
        prompt = [number % VOCAB_SIZE, index, *(token % VOCAB_SIZE for token in range(800))]
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))


def measure_drain(output: int) -> None:
    """Measure how long an instance with 32 running streams takes to leave, and print the time.

    Also prints the number of answers that have changed.
    """
    with cluster(ORDER_FLAGS, output) as url:
        model = find_server(url, None, None).model
        quiet = [Streams(url, model, 64, 400).results() for _ in range(2)]
        streams = Streams(url, model, 64, 400)
        streams.wait_until_running()
        num_there, began_s = _num_requests(url, "decode-0"), time.monotonic()
        httpx.post(f"{url}/admin/instances/decode-0/drain").raise_for_status()
        while _num_requests(url, "decode-0"):
            time.sleep(0.02)
        _print_order("an instance is drained", "empty", num_there, began_s, quiet, streams)


def measure_switch(output: int) -> None:
    """Measure and print how long a switch to prefill takes until the first computed prompt.

    The instance is a decode instance with 8 running streams.
    """
    with cluster(ORDER_FLAGS, output) as url:
        model = find_server(url, None, None).model
        quiet = [Streams(url, model, 16, 400).results() for _ in range(2)]
        streams = Streams(url, model, 16, 400)
        streams.wait_until_running()
        num_there, began_s, number = _num_requests(url, "decode-1"), time.monotonic(), 0
        order = f"{url}/admin/instances/decode-1/role"
        httpx.post(order, params={"role": "prefill"}).raise_for_status()
        while not _has_computed(url, "decode-1"):
            number += 1
            _ask_for_prompts(url, model, number)
        title = "a decode instance becomes a prefill instance"
        _print_order(title, "first prompt computed", num_there, began_s, quiet, streams)


def _print_order(
    title: str, what: str, num_there: int, began_s: float, quiet: list[list[StreamResult]], streams: Streams
) -> None:
    """Print the time of a completed order, and the changes in the streams' answers."""
    seconds = time.monotonic() - began_s
    results = streams.results()
    before, again = quiet
    print_table(
        title,
        ("", "streams there", f"{what} after", "answers that changed", "longest gap"),
        [
            ("before", "", "", _num_changed(before, again), _longest_gap(again)),
            (
                "ordered",
                f"{num_there}",
                f"{seconds:.2f} s",
                _num_changed(before, results),
                _longest_gap(results),
            ),
        ],
    )


def _num_changed(before: list[StreamResult], after: list[StreamResult]) -> str:
    num_changed = sum(a.text != b.text for a, b in zip(before, after, strict=True))
    return f"{num_changed} of {len(after)}"


def _longest_gap(results: list[StreamResult]) -> str:
    return f"{max(result.longest_gap_s for result in results):.2f} s"


def main() -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elasticity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", default="swing,steady,switch,drain", metavar="NAME,...")
    parser.add_argument("--sides", default=";".join(SIDES), metavar="NAME;...", help="default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of a phase")
    parser.add_argument("--cycles", type=count, default=2, help="times that both phases come")
    parser.add_argument("--load", type=float, default=1.0, help="times the usual rates")
    arguments, flags = parser.parse_known_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - {"swing", "steady", "switch", "drain"}:
        parser.error(f"--only {sorted(unknown)[0]}: expected swing, steady, switch or drain")
    sides = arguments.sides.split(";")
    if unknown := set(sides) - set(SIDES):
        parser.error(f"--sides {sorted(unknown)[0]}: expected some of {'; '.join(SIDES)}")
    duration_s = 2 * arguments.seconds * arguments.cycles
    with telling_why(ServerError, httpx.HTTPError) as output:
        if "swing" in chosen:
            phases = swinging(arguments.seconds, arguments.load)
            compare("swinging load", phases, duration_s, sides, flags, output)
        if "steady" in chosen:
            compare("steady load", swinging(1.0, arguments.load), duration_s, sides, flags, output)
        if "switch" in chosen:
            measure_switch(output)
        if "drain" in chosen:
            measure_drain(output)


if __name__ == "__main__":
    main()
