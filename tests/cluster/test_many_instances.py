"""Two prefill and two decode instances: they drain without a loss, hot prefixes spread over them."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.tiny_cluster import (
    TRANSFERS,
    body,
    complete,
    metric,
    post,
    streaming,
    text_in,
    text_of,
    tiny_server,
)
from tests.deadline import DEADLINE_S

pytestmark = pytest.mark.cluster
NUM_CLIENTS = 6
NUM_TOKENS = 120
PROMPTS = [[3 + index, *range(3, 40)] for index in range(NUM_CLIENTS)]
HOT_PREFIX = list(range(3, 163))


def two_of_each(tiny: Path, run_dir: Path) -> ForkedServer:
    hopeless = '--conductor-slo-classes={"hopeless": {"ttft_slo_s": 1e-9}}'
    return tiny_server(tiny, run_dir, TRANSFERS, "--num-prefill=2", "--num-decode=2", hopeless)


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with two_of_each(tiny, tmp_path_factory.mktemp("mc")) as running:
        yield running


@pytest.fixture
def unused(tiny: Path, run_dir: Path) -> Iterator[Server]:
    """A cluster whose pools and counters are those of one test."""
    with two_of_each(tiny, run_dir) as running:
        yield running


def streamed(server: Server, prompt: list[int]) -> str:
    """The text of one streamed answer, which must be whole."""
    with streaming(server, prompt=prompt, num_tokens=NUM_TOKENS) as events:
        *pieces, end = events
    assert end == "[DONE]"
    return "".join(map(text_in, pieces))


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    """The answers to `PROMPTS` where nothing happens."""
    return [text_of(complete(server, prompt=prompt, num_tokens=NUM_TOKENS)) for prompt in PROMPTS]


def test_instances_that_drain_finish_what_they_run(server: Server, expected: list[str]) -> None:
    """One by the admin call, one by SIGTERM: no answer fails or changes, and the others serve."""

    def drain(action: str = "drain?stay=true") -> dict[str, object]:
        answer = HTTP.post(f"{server.url}/admin/instances/decode-0/{action}", timeout=DEADLINE_S)
        told: dict[str, object] = answer.raise_for_status().json()
        return told

    def num_starts() -> int:
        return sum("ready" in line and "prefill-1" in line for line in server.lines)

    assert HTTP.post(f"{server.url}/admin/instances/nobody/drain", timeout=DEADLINE_S).status_code == 404
    started = num_starts()
    num_begun = threading.Semaphore(0)

    def ask(client: int) -> None:
        for _ in range(4):
            num_begun.release()
            assert streamed(server, PROMPTS[client]) == expected[client]

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(ask, client) for client in range(NUM_CLIENTS)]
        for _ in range(NUM_CLIENTS + 2):
            assert num_begun.acquire(timeout=DEADLINE_S)
        assert drain()["state"] == "draining"
        os.kill(server.pid_of("prefill-1"), signal.SIGTERM)
        for asked in clients:
            asked.result()
    eventually(lambda: drain()["num_requests"] == 0, "decode-0 has nothing left")
    eventually(lambda: num_starts() > started, "prefill-1 has ended and is back")
    assert drain("serve")["state"] == "serving"
    assert metric(server, "mooncake_ended_requests_total", outcome="failed") == 0


def num_tokens(server: Server, instance: str, source: str) -> float:
    """Prompt tokens that an instance has got from `source`."""
    return metric(server, "mooncake_prefill_tokens_total", instance=instance, source=source)


def test_a_hot_prefix_spreads_without_a_command(unused: Server) -> None:
    """What one instance has computed, the other fetches when the first is busy, and keeps (section 6.2)."""

    def reused(name: str) -> float:
        return sum(num_tokens(unused, name, source) for source in ("dram", "remote"))

    complete(unused, prompt=HOT_PREFIX, num_tokens=1)
    suffixes = itertools.count(200)

    def both_have_it() -> bool:
        with ThreadPoolExecutor(8) as threads:
            prompts = [[*HOT_PREFIX, next(suffixes)] for _ in range(8)]
            list(threads.map(lambda prompt: complete(unused, prompt=prompt, num_tokens=2), prompts))
        return all(reused(name) >= 152 for name in ("prefill-0", "prefill-1"))

    eventually(both_have_it, "both prefill instances have reused the prefix")


def test_hot_prefixes_are_replicated_without_a_command(unused: Server) -> None:
    """Ahead of requests: the second instance has served none when it gets its copy."""

    def tell(name: str, action: str) -> None:
        HTTP.post(f"{unused.url}/admin/instances/{name}/{action}", timeout=DEADLINE_S).raise_for_status()

    tell("prefill-1", "drain?stay=true")
    with ThreadPoolExecutor(8) as threads:  # soon enough, on a busy machine too: counts of uses fade
        prompts = [[*HOT_PREFIX, suffix] for suffix in range(200, 240)]
        list(threads.map(lambda prompt: complete(unused, prompt=prompt, num_tokens=1), prompts))
    tell("prefill-1", "serve")
    eventually(lambda: metric(unused, "mooncake_replication_copies") == 1, "it has a copy")
    assert not num_tokens(unused, "prefill-1", "remote")
    tell("prefill-0", "drain?stay=true")
    complete(unused, prompt=[*HOT_PREFIX, 90], num_tokens=1)
    eventually(lambda: num_tokens(unused, "prefill-1", "dram") == len(HOT_PREFIX), "its copy is used")
    assert not num_tokens(unused, "prefill-1", "remote")


def test_excess_is_refused_with_a_time_to_come_back_and_nothing_is_left_of_it(
    server: Server, expected: list[str]
) -> None:
    """As many again as are served come in a class whose SLO cannot be met."""
    instances = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(2)]

    def leftovers() -> list[float]:
        states = ("waiting", "interrupted", "reserving", "prefilling", "decoding")
        kinds = ("reservations", "leases")
        return [metric(server, "mooncake_requests_by_state", state=state) for state in states] + [
            metric(server, "mooncake_pool_users", instance=name, kind=kind)
            for name in instances
            for kind in kinds
        ]

    def refused(number: int) -> bool:
        asked = body([3 + number, *range(3, 60)], NUM_TOKENS)
        answer = post(server, asked, headers={"X-Mooncake-SLO-Class": "hopeless"})
        if answer.status_code == 200:  # an instance about which nothing is known takes anything
            return False
        assert answer.status_code == 429, answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert "conductor.ttft_slo_s" in answer.json()["error"]["message"]
        return True

    with ThreadPoolExecutor(3 * NUM_CLIENTS) as threads:
        served = [threads.submit(streamed, server, prompt) for prompt in PROMPTS]
        excess = list(threads.map(refused, range(2 * NUM_CLIENTS)))
        assert [answer.result() for answer in served] == expected
    assert any(excess)
    eventually(
        lambda: metric(server, "mooncake_rejections_total", reason="ttft_slo_s") == sum(excess),
        "every rejection is counted, once",
    )
    eventually(lambda: not any(leftovers()), "nothing is left of any request")
