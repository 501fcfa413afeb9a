"""Bursts of requests with one new prefix: it is computed once, by the instance that got the first of them."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.tiny_cluster import TRANSFERS, complete, samples, text_of, tiny_server, wait_until_idle
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer
from tests.workers.references import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NUM_SHARED = 2048
BURST = [prompt_of(1, NUM_SHARED) + prompt_of(seed, 10 + 5 * seed) for seed in range(2, 8)]
NUM_OWN = sum(map(len, BURST)) - len(BURST) * NUM_SHARED
NUM_TOKENS = 8
PREFILL = ("prefill-0", "prefill-1")
ROOMY = "--kvcache-pool-bytes=16MiB"
PATIENCE = ("--conductor-peer-timeout-s=60", "--hang-timeout-s=120")
FLAGS = {
    (*PREFILL, "decode-0"): [TRANSFERS, "--num-prefill=2"],
    ("both-0", "both-1"): ["--num-both=2"],
}


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for longer prompts."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("smollm2", directory, max_position_embeddings=4096)
    write_tiny_tokenizer(directory)
    return directory


def answer_to(server: Server, index: int, **fields: object) -> dict[str, Any]:
    return complete(server, prompt=BURST[index], num_tokens=NUM_TOKENS, **fields)


@pytest.fixture(scope="module")
def expected(long_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers where nothing is shared."""
    with tiny_server(long_tiny, tmp_path_factory.mktemp("mc")) as server:
        return [text_of(answer_to(server, index, cache_salt=str(index))) for index in range(len(BURST))]


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(BURST)) as threads:
        yield threads


def num_computed(server: Server) -> float:
    """The prompt tokens that instances have computed, by their latest heartbeats."""
    [by_labels] = samples(server, "mooncake_prefill_tokens_total")
    return sum(number for labels, number in by_labels.items() if 'source="computed"' in labels)


def placed(server: Server) -> list[str]:
    """The instances of the requests that have one."""
    state = HTTP.get(f"{server.url}/dashboard/state", timeout=DEADLINE_S).json()
    return [request["prefill"] for request in state["requests"] if request["prefill"] is not None]


def place_all(
    server: Server, clients: ThreadPoolExecutor, instances: tuple[str, ...]
) -> tuple[list[Future[dict[str, Any]]], str]:
    """The answers to come to the burst, and the instance that got it. The instances have been stopped before,
    so that all are placed before the first has been computed."""
    for name in instances:
        os.kill(server.pid_of(name), signal.SIGSTOP)
    answers = [clients.submit(answer_to, server, index) for index in range(len(BURST))]
    eventually(lambda: len(placed(server)) == len(BURST), "all are placed")
    [chosen] = set(placed(server))
    return answers, chosen


@pytest.mark.parametrize("instances", FLAGS, ids="+".join)
def test_new_prefix_of_a_burst_is_computed_once(
    long_tiny: Path,
    run_dir: Path,
    clients: ThreadPoolExecutor,
    expected: list[str],
    instances: tuple[str, ...],
) -> None:
    with tiny_server(long_tiny, run_dir, *FLAGS[instances], ROOMY, *PATIENCE) as server:
        submitted, _ = place_all(server, clients, instances[:2])
        for name in instances[:2]:
            os.kill(server.pid_of(name), signal.SIGCONT)
        answers = [answer.result() for answer in submitted]
        assert [text_of(answer) for answer in answers] == expected
        num_cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        assert num_cached == (len(BURST) - 1) * NUM_SHARED
        eventually(lambda: num_computed(server) == NUM_SHARED + NUM_OWN, "the prefix is computed once")
        wait_until_idle(server, instances=instances)


def test_burst_whose_instance_is_killed_is_answered_as_ever(
    long_tiny: Path, run_dir: Path, clients: ThreadPoolExecutor, expected: list[str]
) -> None:
    flags = (TRANSFERS, "--num-prefill=2", ROOMY, *PATIENCE)
    with tiny_server(long_tiny, run_dir, *flags) as server:
        submitted, chosen = place_all(server, clients, PREFILL)
        os.kill(server.pid_of(chosen), signal.SIGKILL)
        [other] = {*PREFILL} - {chosen}
        os.kill(server.pid_of(other), signal.SIGCONT)
        assert [text_of(answer.result()) for answer in submitted] == expected
        wait_until_idle(server, instances=(*PREFILL, "decode-0"))
