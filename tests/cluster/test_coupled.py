"""Instances that compute their own prompts: the answers are a pair's, whatever happens."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import (
    PAIR,
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
FLAGS = {COUPLED: ["--num-both=1"], PAIR: []}
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


@pytest.mark.parametrize("instances", FLAGS, ids="+".join)
def test_tokens_are_those_of_a_pair(
    tiny: Path, run_dir: Path, expected: list[str], instances: tuple[str, ...]
) -> None:
    with tiny_server(tiny, run_dir, SHORT_CHUNKS, *FLAGS[instances]) as server:
        assert answers(server) == expected
        assert answers(server) == expected, "with the prefixes that the pool has now"
        eventually(
            lambda: (
                metric(server, "mooncake_decode_prompts_total", inlined="yes", instance=instances[-1]) > 0
            ),
            "some were inlined",
        )
        wait_until_idle(server, instances=instances)


@pytest.mark.parametrize("instances", FLAGS, ids="+".join)
def test_kills_change_no_answer(tiny: Path, run_dir: Path, instances: tuple[str, ...]) -> None:
    with tiny_server(tiny, run_dir, SHORT_CHUNKS, *FLAGS[instances]) as server:
        kill_at_random(server, PROMPTS[:4], num_tokens=80, num_kills=4, hang_ups=0.2, instances=instances)


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
