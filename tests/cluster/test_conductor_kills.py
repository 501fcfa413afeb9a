"""Conductors that die, while fronts and instances on nodes of their own live: no stream ends with them."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.separate_nodes import SeparateNodes, wait_until_instances_idle
from tests.cluster.streams import PROMPTS, Streams
from tests.cluster.tiny_cluster import complete, is_ready, keep_asking, metric, samples, text_of
from tests.deadline import DEADLINE_S
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The Conductor's node, which has a front of its own that nobody asks, and that of another front."""

    conductor: Server
    front: Server
    workers: dict[str, Server]

    def order(self, path: str) -> None:
        """Give an operator's order."""
        HTTP.post(f"{self.conductor.url}/admin/{path}", timeout=DEADLINE_S).raise_for_status()

    def kill(self, name: str) -> None:
        """Kill the conductor, or the worker of an instance."""
        os.kill(self.workers.get(name, self.conductor).pid_of(name), signal.SIGKILL)

    def kill_conductor(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.conductor.pid_of("conductor"), signum)

    def num_in(self, state: str) -> float:
        """The requests in a state as far as the Conductor knows; 0 without one."""
        try:
            return metric(self.conductor, "mooncake_requests_by_state", state=state)
        except httpx.TransportError:
            return 0

    @property
    def num_decoding(self) -> float:
        return self.num_in("decoding")

    @property
    def num_placements(self) -> float:
        """The requests that the Conductor has placed in its life."""
        [placements] = samples(self.conductor, "mooncake_placements_total")
        return sum(placements.values())

    def wait_until_idle(self) -> None:
        eventually(lambda: is_ready(self.conductor), "all instances are back")
        wait_until_instances_idle(self.conductor)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    endpoint = f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        cluster = SeparateNodes(stack, tmp_path_factory.mktemp("model"), endpoint)
        conductor, front = cluster.start("conductor"), cluster.start("front")
        workers = cluster.start_instances()
        eventually(lambda: is_ready(front), "there is a pair")
        yield Nodes(conductor, front, workers)


def test_streams_outlive_their_conductor(nodes: Nodes) -> None:
    with Streams(nodes.front) as streams:
        for _ in range(2):
            nodes.kill_conductor()
            eventually(lambda: nodes.num_decoding == len(PROMPTS), "another conductor has all of them")
            streams.wait_for_more()
        assert nodes.num_placements == 0, "they have gone on where they were"
        streams.check()
    nodes.wait_until_idle()


def test_streams_go_on_while_their_conductor_is_stopped(nodes: Nodes) -> None:
    with Streams(nodes.front) as streams:
        nodes.kill_conductor(signal.SIGSTOP)
        try:
            eventually(lambda: not is_ready(nodes.front), "its front misses the conductor")
            streams.wait_for_more()
        finally:
            nodes.kill_conductor(signal.SIGCONT)
        eventually(lambda: nodes.num_decoding == len(PROMPTS), "it has all of them, or its successor")
        streams.check()
    nodes.wait_until_idle()


def test_prompts_that_are_queued_are_computed_once(nodes: Nodes) -> None:
    prompts = [[3 + index, *(7 + number % 500 for number in range(5000))] for index in range(4)]
    num_before = nodes.num_placements

    def are_all_ordered() -> bool:
        return nodes.num_placements == num_before + len(prompts) and not nodes.num_in("reserving")

    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(complete, nodes.front, prompt=prompt, num_tokens=9) for prompt in prompts]
        eventually(are_all_ordered, "they are in the queue of the prefill instance")
        nodes.kill_conductor()
        answers = [text_of(one.result()) for one in asked]
    assert nodes.num_placements == 0, "they have gone on where they were"
    assert answers == [text_of(complete(nodes.front, prompt=prompt, num_tokens=9)) for prompt in prompts]
    nodes.wait_until_idle()


def migrate(nodes: Nodes) -> None:
    live = HTTP.get(f"{nodes.conductor.url}/dashboard/state", timeout=DEADLINE_S).json()["requests"]
    for request in live:
        HTTP.post(f"{nodes.conductor.url}/admin/requests/{request['id']}/migrate", timeout=DEADLINE_S)


def drain(nodes: Nodes) -> None:
    nodes.order("instances/d1/drain?stay=true")


def switch(nodes: Nodes) -> None:
    nodes.order("instances/d1/role?role=prefill")


@pytest.mark.parametrize("order", [migrate, drain, switch])
def test_what_a_conductor_was_about_to_do_is_given_up(nodes: Nodes, order: Callable[[Nodes], None]) -> None:
    with Streams(nodes.front) as streams:
        order(nodes)
        nodes.kill_conductor()
        eventually(lambda: nodes.num_decoding == len(PROMPTS), "another conductor has all of them")
        streams.wait_for_more()
        streams.check()
    nodes.wait_until_idle()
    instances = HTTP.get(f"{nodes.conductor.url}/admin/instances", timeout=DEADLINE_S).json()["instances"]
    assert {instance["state"] for instance in instances} == {"serving"}


def test_answers_are_right_while_conductors_and_workers_are_killed(nodes: Nodes) -> None:
    """Prompts are queued and computed, requests end and come while there is no conductor."""
    rng, over = random.Random(1), threading.Event()
    prompts = [[3 + index, *range(10, 200)] for index in range(6)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        quiet = threads.map(lambda prompt: complete(nodes.front, prompt=prompt, num_tokens=60), prompts)
        expected = list(map(text_of, quiet))

    with ThreadPoolExecutor(len(prompts)) as threads:
        clients = [
            threads.submit(keep_asking, nodes.front, over, text, prompt=prompt, num_tokens=60)
            for prompt, text in zip(prompts, expected, strict=True)
        ]
        try:
            for victim in ("conductor", "d0", "conductor", "conductor", "p0"):
                over.wait(rng.uniform(0.2, 4.0))
                nodes.kill(victim)
        finally:
            over.set()
        assert all(client.result() for client in clients)
    nodes.wait_until_idle()
