"""The KVCache pool as a user of the server sees it: prefixes outlive workers, memory and whole nodes."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import STOP_DEADLINE_S, Server, eventually
from tests.cluster.tiny_cluster import (
    PAIR_FLAGS,
    SMALL,
    TRANSFERS,
    cached_tokens,
    complete,
    metric,
    streaming,
    text_of,
)
from tests.deadline import DEADLINE_S

pytestmark = pytest.mark.cluster
BLOCK_SIZE = 8
NUM_BLOCKS = 9
PROMPT = list(range(3, 3 + NUM_BLOCKS * BLOCK_SIZE + 5))


@pytest.fixture
def arguments(tiny: Path, tmp_path: Path) -> list[str]:
    """DRAM for few prompts and SSD for many."""
    (tmp_path / "ssd").mkdir()
    few = ["--kvcache-pool-bytes=200KiB", f"--kvcache-ssd-dirs={tmp_path / 'ssd'}"]
    return [f"--model={tiny}", *SMALL, *PAIR_FLAGS, TRANSFERS, *few, "--kvcache-ssd-bytes=16MiB"]


def answer_to(server: Server, prompt: list[int], num_tokens: int = 2) -> tuple[str, int]:
    """Text, and how many prompt tokens the pool held."""
    answer = complete(server, prompt=prompt, num_tokens=num_tokens)
    return text_of(answer), cached_tokens(answer)


def other_prompt(number: int) -> list[int]:
    return [3 + (token + 7 * number) % 90 for token in range(NUM_BLOCKS * BLOCK_SIZE + 1)]


def test_a_prefix_that_left_memory_comes_back_from_ssd_with_the_same_text(
    arguments: list[str], run_dir: Path
) -> None:
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        text, cached = answer_to(server, PROMPT)
        assert cached == 0
        for number in range(1, 8):  # several times what DRAM holds
            answer_to(server, other_prompt(number))
        assert answer_to(server, PROMPT) == (text, NUM_BLOCKS * BLOCK_SIZE)
        eventually(
            lambda: metric(server, "mooncake_pool_hits_total", instance="prefill-0", tier="ssd") > 0,
            "the hit is reported as one of the SSD tier",
        )
        assert metric(server, "mooncake_pool_orphaned_pages", instance="prefill-0") == 0
        server.stop()
    with ForkedServer(*arguments, run_dir=run_dir) as server:  # the memory is gone, the slabs are not
        again, cached = answer_to(server, other_prompt(1))
        assert cached == NUM_BLOCKS * BLOCK_SIZE
        assert answer_to(server, other_prompt(1))[0] == again


def test_a_worker_killed_while_it_generates_loses_no_sealed_block(
    arguments: list[str], run_dir: Path
) -> None:
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        expected, _ = answer_to(server, PROMPT, num_tokens=200)
        for index, worker in enumerate(("prefill-0", "decode-0")):
            with streaming(server, prompt=other_prompt(index), num_tokens=200) as events:
                next(events)
                os.kill(server.pid_of(worker), signal.SIGKILL)
                assert "[DONE]" in events
            assert answer_to(server, PROMPT, num_tokens=200) == (expected, NUM_BLOCKS * BLOCK_SIZE)


def test_memory_in_a_file_outlives_the_node(arguments: list[str], run_dir: Path, tmp_path: Path) -> None:
    in_file = [*arguments, f"--kvcache-segment-dir={tmp_path}"]
    with ForkedServer(*in_file, run_dir=run_dir) as server:
        text, _ = answer_to(server, PROMPT)
        refusal = f"belongs to the live process {server.process.pid}"
        with ForkedServer(*in_file, run_dir=run_dir, until=refusal) as refused:
            assert refused.process.wait(DEADLINE_S) == 2
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with ForkedServer(*in_file, run_dir=run_dir) as server:
        assert answer_to(server, PROMPT) == (text, NUM_BLOCKS * BLOCK_SIZE)


def test_a_server_that_is_ended_properly_finds_its_prefixes_again(
    arguments: list[str], run_dir: Path
) -> None:
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        text, _ = answer_to(server, PROMPT)
        assert server.stop() < STOP_DEADLINE_S
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        assert answer_to(server, PROMPT) == (text, NUM_BLOCKS * BLOCK_SIZE)
