"""A simulated prefill instance against queueing theory."""

import random
from collections.abc import Callable, Sequence

import pytest

from benchmarks.tools.simulator.cluster.cache import SimulatedPool
from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.cluster.machines.network import Network
from benchmarks.tools.simulator.cluster.node import Node
from benchmarks.tools.simulator.cluster.prefill import PrefillInstance
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from mooncake.config.policies import EvictionPolicy
from mooncake.messages.blocks import KVLayout
from mooncake.messages.costs import Costs as Polynomial
from mooncake.messages.pools import Grant, MessengerAddress
from mooncake.messages.requests import Ref, Request, SamplingParams
from mooncake.messages.workers import Prefill, Prefilled, Role
from workers.prefill.queue import PrefillQueue

CHUNK = 512
LAYOUT = KVLayout(1, 1, 1, CHUNK, "bfloat16")
NOBODY = MessengerAddress("nobody", 1, "", "", ())


class DrawnService:
    """Each pass takes what is drawn for it."""

    kv_token_s = 0.0
    profiled = (Polynomial(0, 0, 0), Polynomial(0, 0, 0))

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self.drawn: list[float] = []

    def iteration_s(self, shares: Sequence[PromptShare], batch_size: int) -> float:
        self.drawn.append(self._draw())
        return self.drawn[-1]


class Nowhere:
    def arrived(self, ref: Ref) -> None:
        pass


def ends_of(
    requests: Sequence[SimulatedRequest],
    service: DrawnService,
    pcie_bytes_per_s: float = float("inf"),
    *,
    is_windowed: bool = False,
) -> list[float]:
    """When each prompt has been computed, in passes of a chunk."""
    clock = Clock()
    ended_s: list[float] = []

    def send(message: object) -> None:
        assert isinstance(message, Prefilled)
        ended_s.append(clock.now_s)

    node = Node(
        "prefill-0",
        Role.PREFILL,
        clock,
        service,
        Network(clock),
        SimulatedPool(clock, 100_000, EvictionPolicy.LRU),
        LAYOUT,
        1.0,
        pcie_bytes_per_s,
        send,
        {},
    )
    instance = PrefillInstance(
        node,
        PrefillQueue(CHUNK),
        lambda name: requests[int(name)],
        lambda name: Nowhere(),
        is_windowed=is_windowed,
    )
    for request in requests:
        ref = Ref(1, str(request.number), 1)
        sampling = SamplingParams(max_tokens=1)
        order = Prefill(ref, Request(ref.request_id, [], [], sampling, ""), Grant(0, NOBODY, []))
        clock.at(request.arrival_s, instance.receive, order)
    clock.run()
    return ended_s


def waits_of(arrivals_s: Sequence[float], service: DrawnService) -> list[float]:
    """From arrival to the begin of its pass, of prompts that fill one pass each."""
    requests = [SimulatedRequest(i, arrival_s, CHUNK, 1, []) for i, arrival_s in enumerate(arrivals_s)]
    return [
        end_s - seconds - arrival_s
        for end_s, seconds, arrival_s in zip(
            ends_of(requests, service), service.drawn, arrivals_s, strict=True
        )
    ]


def poisson(rate_per_s: float, num: int, rng: random.Random) -> list[float]:
    now_s, arrivals_s = 0.0, []
    for _ in range(num):
        now_s += rng.expovariate(rate_per_s)
        arrivals_s.append(now_s)
    return arrivals_s


@pytest.mark.parametrize("rho", [0.7])
def test_waits_of_constant_prefills_are_those_of_m_d_1(rho: float) -> None:
    arrivals_s = poisson(rho, 40_000, random.Random(1))
    waits_s = waits_of(arrivals_s, DrawnService(lambda: 1.0))
    assert sum(waits_s) / len(waits_s) == pytest.approx(rho / (2 * (1 - rho)), rel=0.03)


def test_waits_of_exponential_prefills_are_those_of_m_m_1() -> None:
    rho, rng = 0.5, random.Random(2)
    arrivals_s = poisson(rho, 60_000, rng)
    waits_s = waits_of(arrivals_s, DrawnService(lambda: rng.expovariate(1.0)))
    assert sum(waits_s) / len(waits_s) == pytest.approx(rho / (1 - rho), rel=0.03)


def test_every_wait_is_lindleys() -> None:
    rng = random.Random(3)
    arrivals_s = poisson(0.9, 2_000, rng)
    service = DrawnService(lambda: rng.expovariate(1.0))
    waits_s = waits_of(arrivals_s, service)
    expected_s, wait_s = [], 0.0
    for number, arrival_s in enumerate(arrivals_s):
        if number:
            gap_s = arrival_s - arrivals_s[number - 1]
            wait_s = max(0.0, wait_s + service.drawn[number - 1] - gap_s)
        expected_s.append(wait_s)
    assert waits_s == pytest.approx(expected_s, abs=1e-6)


@pytest.mark.parametrize("is_windowed", [False, True])
def test_passes_of_a_window_of_layers_load_what_stands_before_them(is_windowed: bool) -> None:
    """With one layer, copies and computation come one after the other; a chunk takes 1 s to compute."""
    chunk_s = 0.25  # to copy
    request = SimulatedRequest(0, 0.0, 4 * CHUNK, 1, [])
    service = DrawnService(lambda: 1.0)
    (end_s,) = ends_of([request], service, LAYOUT.block_bytes / chunk_s, is_windowed=is_windowed)
    num_loaded = 0 + 1 + 2 + 3 if is_windowed else 0
    assert end_s == pytest.approx(4 + (4 + num_loaded) * chunk_s)
