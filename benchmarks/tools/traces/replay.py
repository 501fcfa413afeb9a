"""Changes of a trace that is played: without the ticks of its clock, at another speed, a part of it.

Each function takes requests in the order of their arrival and yields them in that order, one at a time.

Owns: changes of a load. Does not know: where the load comes from, which system gets it.
"""

import itertools
import random
from collections.abc import Iterable, Iterator

from benchmarks.tools.traces.request import TraceRequest

TICK_S = 3.0
"""Seconds of a tick of the clock of Mooncake's published traces."""


def jittered(requests: Iterable[TraceRequest], jitter_s: float, seed: int) -> Iterator[TraceRequest]:
    """Spread the requests of each tick of a coarse clock over `jitter_s` from the tick, but not beyond the
    next one.

    Published traces have such ticks (Mooncake's: 3 s). Played unchanged, every tick would be a burst.
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
    """Yield the requests at another speed: 2 plays two hours in one."""
    for request in requests:
        yield request._replace(arrival_s=request.arrival_s / speed)


def until(requests: Iterable[TraceRequest], duration_s: float) -> Iterator[TraceRequest]:
    """Yield the requests that arrive before `duration_s`."""
    return itertools.takewhile(lambda request: request.arrival_s < duration_s, requests)
