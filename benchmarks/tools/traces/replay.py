"""Changes of a trace: arrivals between the ticks of its clock, another speed, only a part of it.

Each function takes requests in order of arrival and yields them in that order, one at a time.

Owns: changes of a load. Does not know: where the load comes from, which system gets it.
"""

import itertools
import random
from collections.abc import Iterable, Iterator

from benchmarks.tools.traces.request import TraceRequest

TICK_S = 3.0
"""Seconds of a tick of the clock of Mooncake's published traces."""


def jittered(requests: Iterable[TraceRequest], jitter_s: float, seed: int) -> Iterator[TraceRequest]:
    """Yield the requests with arrivals spread over `jitter_s` seconds behind the tick of a coarse clock.

    Published traces have such ticks (Mooncake's: 3 s). Without this change every tick would be a burst of
    requests. No request arrives after the next tick.
    """
    rng = random.Random(seed)
    ticks = itertools.groupby(requests, key=lambda request: request.arrival_s)
    tick = _next_tick(ticks)
    while tick is not None:
        arrival_s, members = tick
        tick = _next_tick(ticks)
        room_s = jitter_s if tick is None else min(jitter_s, tick[0] - arrival_s)
        offsets_s = sorted(rng.random() * room_s for _ in members)
        for request, offset_s in zip(members, offsets_s, strict=True):
            yield request._replace(arrival_s=arrival_s + offset_s)


def _next_tick(
    ticks: Iterator[tuple[float, Iterator[TraceRequest]]],
) -> tuple[float, list[TraceRequest]] | None:
    for arrival_s, members in ticks:
        return arrival_s, list(members)
    return None


def at_speed(requests: Iterable[TraceRequest], speed: float) -> Iterator[TraceRequest]:
    """Yield the requests at another speed: with 2, two hours take one hour."""
    for request in requests:
        yield request._replace(arrival_s=request.arrival_s / speed)


def until(requests: Iterable[TraceRequest], duration_s: float) -> Iterator[TraceRequest]:
    """Yield the requests that arrive before second `duration_s`."""
    return itertools.takewhile(lambda request: request.arrival_s < duration_s, requests)
