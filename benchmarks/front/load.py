"""The load of the front's benchmark, sent by wrk, and the figures of one round.

Owns: the requests, the connections, the figures of a round. Does not know: the servers' processes (`fronts`),
several rounds.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from benchmarks.front.fronts import Server, cpu_s
from benchmarks.front.instant_workers import STEP_S
from benchmarks.front.wrk import Answers, Wrk
from benchmarks.tools.load.bench import find_server
from benchmarks.tools.load.prompts import PromptMaker
from benchmarks.tools.load.sources import Planned

NUM_INPUT, NUM_OUTPUT = 1000, 64
FIRST_TOKENS_PER_S = 40.0
_FIRST_TOKEN_CONNECTIONS = 16
_TOKEN_IDS = (1000, 30_000)


class Cost(NamedTuple):
    """The processor time of a request, in one round or as the median of several rounds.

    `own_cpu_ms` leaves the further fronts out.
    """

    rate_per_s: float
    cpu_ms: float
    own_cpu_ms: float
    answer_bytes: float


class Latency(NamedTuple):
    """The latencies of one round, in seconds.

    `late_s`: the time of each whole answer beyond the length of its steps.
    """

    rate_per_s: float
    ttft_s: list[float]
    late_s: list[float]


class Load(NamedTuple):
    """The load of one wrk process. Each connection pauses for up to `max_pause_s` before its next request.

    `after_s`: the seconds until wrk starts.
    """

    url: str
    bodies: list[bytes]
    num_output: int
    num_connections: int
    max_pause_s: float = 0.0
    after_s: float = 0.0

    @property
    def turn_s(self) -> float:
        """The approximate seconds from one request of a connection to the next."""
        return self.num_output * STEP_S + self.max_pause_s / 2


def cost(wrk: Wrk, num_connections: int, num_turns: int, server: Server, seed: int) -> Cost:
    """Measure the processor time of one round. Raises WrkError if an answer is incomplete."""
    whole = Load(server.url, _bodies(server, num_turns * num_connections, seed), NUM_OUTPUT, num_connections)
    before_s = [cpu_s(pid) for pid in server.pids]
    answers = _answers(wrk, _divided(whole, server))
    spent_s = [cpu_s(pid) - before for pid, before in zip(server.pids, before_s, strict=True)]
    return Cost(
        num_connections / statistics.mean(_times_s(answers)),
        1000 * sum(spent_s) / len(whole.bodies),
        1000 * spent_s[0] / len(whole.bodies),
        statistics.mean(answer.mean_bytes for answer in answers),
    )


def latency(wrk: Wrk, num_connections: int, num_turns: int, server: Server, seed: int) -> Latency:
    """Measure the latencies of one round. Raises WrkError if an answer is incomplete."""
    bodies = _bodies(server, num_turns * num_connections, 2 * seed)
    whole = Load(server.url, bodies, NUM_OUTPUT, num_connections, STEP_S)
    num_first = int(FIRST_TOKENS_PER_S * (num_turns - 1) * whole.turn_s)
    bodies = _bodies(server, num_first, 2 * seed + 1, num_output=1)
    pause_s = 2 * _FIRST_TOKEN_CONNECTIONS / FIRST_TOKENS_PER_S
    # First tokens are asked for while all other connections are busy.
    first = Load(server.url, bodies, 1, _FIRST_TOKEN_CONNECTIONS, pause_s, whole.turn_s)
    loads = _divided(whole, server)
    answers = _answers(wrk, loads + _divided(first, server))
    times_s = _times_s(answers[: len(loads)])
    return Latency(
        num_connections / (statistics.mean(times_s) + STEP_S / 2),
        _times_s(answers[len(loads) :]),
        [time_s - (NUM_OUTPUT - 1) * STEP_S for time_s in times_s],
    )


def _bodies(server: Server, number: int, seed: int, num_output: int = NUM_OUTPUT) -> list[bytes]:
    """Return the bodies of `number` requests with different prompts."""
    prompts = PromptMaker(_TOKEN_IDS, seed, 1.0)
    fixed = {"model": find_server(server.url, None, None).model, "max_tokens": num_output}
    fixed |= {"temperature": 0, "ignore_eos": True, "stream": True}
    return [
        msgspec.json.encode({**fixed, "prompt": prompts.text(Planned(index, 0.0, NUM_INPUT, num_output, ()))})
        for index in range(number)
    ]


def _divided(load: Load, server: Server) -> list[Load]:
    """Return the load divided among the server's further fronts, or the whole load if there are none."""
    urls = [front.url for front in server.fronts] or [load.url]
    number = load.num_connections // len(urls)
    return [
        load._replace(url=url, bodies=load.bodies[index :: len(urls)], num_connections=number)
        for index, url in enumerate(urls)
    ]


def _answers(wrk: Wrk, loads: Sequence[Load]) -> list[Answers]:
    def post(load: Load) -> Answers:
        time.sleep(load.after_s)
        num_events, number = load.num_output, load.num_connections
        return wrk.post(load.url, load.bodies, num_events, number, load.turn_s, load.max_pause_s)

    with ThreadPoolExecutor(len(loads)) as threads:
        return list(threads.map(post, loads))


def _times_s(answers: Iterable[Answers]) -> list[float]:
    return [time_s for answer in answers for time_s in answer.times_s]
