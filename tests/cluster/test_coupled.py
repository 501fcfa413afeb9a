"""Instances that compute their own prompts: the answers are a pair's, whatever happens."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import (
    PAIR,
    PAIR_FLAGS,
    PROMPT,
    TRANSFERS,
    complete,
    kill_at_random,
    metric,
    text_of,
    tiny_server,
    wait_until_idle,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
COUPLED = ("both-0",)
FLAGS = {COUPLED: ["--num-both=1"], PAIR: PAIR_FLAGS}
SHORT_CHUNKS = "--worker-mixed-chunk-tokens=16"
PROMPTS = [[3 + index, *PROMPT[: 7 * index]] for index in range(1, 11)]


def answers(server: Server) -> list[str]:
    """To all prompts at once: some greedy, some drawn."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        asked = [
            threads.submit(complete, server, prompt=prompt, num_tokens=60, temperature=index % 2, seed=index)
            for index, prompt in enumerate(PROMPTS)
        ]
        return [text_of(answer.result()) for answer in asked]


@pytest.fixture(scope="module")
def expected(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of a pair that transfers all KVCache."""
    with tiny_server(tiny, tmp_path_factory.mktemp("mc"), TRANSFERS) as server:
        return answers(server)


@pytest.fixture(scope="module", params=FLAGS, ids="+".join)
def instances(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The instances of `server`."""
    found: tuple[str, ...] = request.param
    return found


@pytest.fixture(scope="module")
def server(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, instances: tuple[str, ...]
) -> Iterator[Server]:
    with tiny_server(tiny, tmp_path_factory.mktemp("mc"), SHORT_CHUNKS, *FLAGS[instances]) as running:
        yield running


def test_tokens_are_those_of_a_pair(server: Server, expected: list[str], instances: tuple[str, ...]) -> None:
    def num_inlined() -> float:
        return metric(server, "mooncake_decode_prompts_total", inlined="yes", instance=instances[-1])

    num_before = num_inlined()
    assert answers(server) == expected
    assert answers(server) == expected, "with the prefixes that the pool has now"
    eventually(lambda: num_inlined() > num_before, "some were inlined")
    wait_until_idle(server, instances=instances)


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_kills_change_no_answer(server: Server, instances: tuple[str, ...], num_kills: int) -> None:
    kill_at_random(server, PROMPTS[:4], num_tokens=80, num_kills=num_kills, hang_ups=0.2, instances=instances)


def test_decode_instances_that_inline_serve_while_prefill_has_gone(tiny: Path, run_dir: Path) -> None:
    with tiny_server(tiny, run_dir) as server:
        before = text_of(complete(server, num_tokens=20))
        prefill = server.pid_of("prefill-0")
        os.kill(prefill, signal.SIGSTOP)
        try:
            eventually(
                lambda: metric(server, "mooncake_instances", role="prefill") == 0, "prefill is given up"
            )
            assert text_of(complete(server, num_tokens=20)) == before
        finally:
            os.kill(prefill, signal.SIGCONT)
