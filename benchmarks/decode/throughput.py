"""Output tokens a second in a closed loop, of our server and of its peers, each on all cores.

Owns: concurrencies, medians over rounds, the limits. Does not know: how servers are started, the peers.
"""

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.serving import NUM_INPUT, NUM_OUTPUT, Completes, closed_loop

CONCURRENCIES = (1, 8, 32)
FURTHER_REQUESTS = 4
"""Requests of a measurement beyond `per_client` for each client.

With only one client, `per_client` requests alone would be too few.
"""
MinRatio = Mapping[int, float]
"""The least ratio of our tokens a second to a peer's tokens a second, by concurrency."""


class Sample(NamedTuple):
    """The figures of one round, or the medians of several rounds."""

    tokens_per_s: float
    ttft_p50_s: float


class Measured:
    """The samples of one server, by concurrency."""

    def __init__(self) -> None:
        self._samples: defaultdict[int, list[Sample]] = defaultdict(list)

    def add(self, client: Completes, concurrencies: Sequence[int], per_client: int) -> None:
        """Measure one round with this client, and close the client."""
        with contextlib.closing(client):
            for concurrency in concurrencies:
                closed_loop(client, concurrency, concurrency)
                rate, ttfts_s = closed_loop(client, concurrency, per_client * concurrency + FURTHER_REQUESTS)
                ttft_s = statistics.median(ttfts_s)
                self._samples[concurrency].append(Sample(rate, ttft_s))

    def medians(self, concurrency: int) -> Sample:
        return Sample(*map(statistics.median, zip(*self._samples[concurrency], strict=True)))


def compare(
    ours: Measured,
    peers: Mapping[str, Measured],
    min_ratios: Mapping[str, MinRatio],
    concurrencies: Sequence[int],
) -> bool:
    """Print the table of medians. Returns whether our ratio to each peer is at least its `min_ratios`."""
    print(f"| concurrency ({NUM_INPUT} in, {NUM_OUTPUT} out) | server | tok/s | ours by it | TTFT p50 |")
    print("|---|---|---|---|---|")
    is_met = True
    for concurrency in concurrencies:
        our = ours.medians(concurrency)
        print(f"| {concurrency} | ours | {_figures(our, '')} |")
        for name, measured in peers.items():
            their = measured.medians(concurrency)
            ratio, bar = our.tokens_per_s / their.tokens_per_s, min_ratios[name].get(concurrency)
            is_met &= bar is None or ratio >= bar
            told = f"{ratio:.2f}" + ("" if bar is None else f" (bar {bar})")
            print(f"| {concurrency} | {name} | {_figures(their, told)} |", flush=True)
    return is_met


def _figures(sample: Sample, told: str) -> str:
    return f"{sample.tokens_per_s:.0f} | {told} | {1000 * sample.ttft_p50_s:.0f} ms"
