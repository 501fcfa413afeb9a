"""Sources of a run's requests, and the description of a run for client processes.

Owns: the description of a run, its requests and their lengths. Does not know: how requests are sent.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from benchmarks.tools.traces.mixes import Mix, mixed
from benchmarks.tools.traces.phases import Phase, in_phases
from benchmarks.tools.traces.reading import TraceFile
from benchmarks.tools.traces.replay import at_speed, jittered, until
from benchmarks.tools.traces.request import TraceError, TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad, synthesize

MOST_TOO_LONG = 10_000
"""The most requests at the beginning of a load that may be too long for the server.

If there are more, the load is given up, because an endless load may have no request that is short enough.
"""


class Source(Protocol):
    """The interface of a source of requests. With equal rate and seed it yields equal requests."""

    def requests(self, rate_per_s: float | None, seed: int) -> Iterator[TraceRequest]:
        """Yield requests in order of arrival.

        If `rate_per_s` is None, the load has its own rate. Raises TraceError.
        """


@dataclasses.dataclass(frozen=True)
class TraceSource:
    """Requests of a trace. A `speed` of 2 plays two hours of the trace in one hour.

    Requests of one tick of the trace's clock are spread over `jitter_s` seconds (of the trace's time).
    """

    path: Path
    speed: float
    jitter_s: float

    def requests(self, rate_per_s: float | None, seed: int) -> Iterator[TraceRequest]:
        assert rate_per_s is None, "a trace has its own arrivals"
        return at_speed(jittered(TraceFile(self.path), self.jitter_s, seed), self.speed)


@dataclasses.dataclass(frozen=True)
class SyntheticSource:
    load: SyntheticLoad

    def requests(self, rate_per_s: float | None, seed: int) -> Iterator[TraceRequest]:
        load = self.load
        if rate_per_s is not None:
            load = msgspec.structs.replace(load, rate_per_s=rate_per_s)
        return synthesize(load, seed)


@dataclasses.dataclass(frozen=True)
class MixSource:
    mix: Mix
    burstiness: float

    def requests(self, rate_per_s: float | None, seed: int) -> Iterator[TraceRequest]:
        return mixed(self.mix, rate_per_s or 1.0, self.burstiness, seed)


@dataclasses.dataclass(frozen=True)
class PhasesSource:
    phases: tuple[Phase, ...]

    def requests(self, rate_per_s: float | None, seed: int) -> Iterator[TraceRequest]:
        assert rate_per_s is None, "phases have rates of their own"
        return in_phases(self.phases, burstiness=1.0, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The description of one run: one server under one load.

    With a `concurrency` this number of requests is in flight at any time, and arrival times are ignored.
    """

    url: str = ""
    model: str = ""
    source: Source
    rate_per_s: float | None = None
    concurrency: int | None = None
    seed: int = 0
    num_requests: int | None = None
    duration_s: float | None = None
    scale_lengths: float = 1.0
    context_len: int | None = None
    """The most tokens that the server takes for a prompt and its answer. Longer requests are left out."""
    token_ids: tuple[int, int]
    """The half-open range of token ids from which prompts are drawn."""
    as_text: bool = False
    ignore_eos: bool = True
    timeout_s: float = 300.0


class Load(NamedTuple):
    """One of the loads under which servers are measured. The fields are as in `Run`."""

    name: str
    rate_per_s: float | None
    concurrency: int | None


class Planned(NamedTuple):
    """One request with the lengths with which it is sent. `number` is its number in the run."""

    number: int
    at_s: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]


class Plan:
    """The requests of a run, made one at a time. `num_too_long` counts the requests that were left out."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.num_too_long = 0

    def __iter__(self) -> Iterator[Planned]:
        """Yield the requests. Raises TraceError."""
        return itertools.islice(self._fitting(), self._run.num_requests)

    def _fitting(self) -> Iterator[Planned]:
        run = self._run
        number = 0
        requests = run.source.requests(run.rate_per_s, run.seed)
        if run.duration_s is not None and run.concurrency is None:
            requests = until(requests, run.duration_s)
        for request in requests:
            num_input = scaled(request.num_input_tokens, run.scale_lengths)
            num_output = scaled(request.num_output_tokens, run.scale_lengths)
            if run.context_len is not None and num_input + num_output > run.context_len:
                self.num_too_long += 1
                if number == 0 and self.num_too_long == MOST_TOO_LONG:
                    raise TraceError(
                        f"the first {MOST_TOO_LONG:,} requests are all longer than the server's context,"
                        f" {run.context_len:,} tokens"
                    )
                continue
            yield Planned(number, request.arrival_s, num_input, num_output, request.hash_ids)
            number += 1


def scaled(num_tokens: int, factor: float) -> int:
    """Return a length multiplied by `factor`, for a smaller model: at least one token."""
    return max(1, int(num_tokens * factor))
