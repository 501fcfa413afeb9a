"""The KVCache pool as a user of the server sees it: prefixes outlive workers, memory and whole nodes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import ROOT, STOP_DEADLINE_S, Server, eventually
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
BLOCK_SIZE = 8
NUM_BLOCKS = 9
PROMPT = list(range(3, 3 + NUM_BLOCKS * BLOCK_SIZE + 5))


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A tiny model, DRAM for few prompts and SSD for many."""
    directory = tmp_path / "tiny"
    tiny_model("smollm2", directory)
    write_tiny_tokenizer(directory)
    (tmp_path / "ssd").mkdir()
    return [
        f"--model={directory}",
        f"--kvcache-block-size={BLOCK_SIZE}",
        "--kvcache-pool-bytes=200KiB",
        "--kvcache-device-bytes=8MiB",
        f"--kvcache-ssd-dirs={tmp_path / 'ssd'}",
        "--kvcache-ssd-bytes=16MiB",
    ]


def complete(server: Server, prompt: list[int], num_tokens: int = 2) -> tuple[str, int]:
    """Text, and how many prompt tokens the pool held."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = (
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S).raise_for_status().json()
    )
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(server: Server, name: str, **labels: str) -> float:
    """A counter or gauge; 0 before it was reported."""
    text = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return next((of.value for of in samples if of.name == name and of.labels == labels), 0.0)


def other_prompt(number: int) -> list[int]:
    return [3 + (token + 7 * number) % 90 for token in range(NUM_BLOCKS * BLOCK_SIZE + 1)]


def test_a_prefix_that_left_memory_comes_back_from_ssd_with_the_same_text(
    arguments: list[str], run_dir: Path
) -> None:
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        text, cached = complete(server, PROMPT)
        assert cached == 0
        for number in range(1, 8):  # several times what DRAM holds
            complete(server, other_prompt(number))
        assert complete(server, PROMPT) == (text, NUM_BLOCKS * BLOCK_SIZE)
        eventually(
            lambda: metric(server, "mooncake_pool_hits_total", instance="prefill-0", tier="ssd") > 0,
            "the hit is reported as one of the SSD tier",
        )
        assert metric(server, "mooncake_pool_orphaned_pages", instance="prefill-0") == 0
        server.stop()
    with ForkedServer(*arguments, run_dir=run_dir) as server:  # the memory is gone, the slabs are not
        again, cached = complete(server, other_prompt(1))
        assert cached == NUM_BLOCKS * BLOCK_SIZE
        assert complete(server, other_prompt(1))[0] == again


def test_a_worker_killed_while_it_generates_loses_no_sealed_block(
    arguments: list[str], run_dir: Path
) -> None:
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        expected, _ = complete(server, PROMPT, num_tokens=200)
        for index, worker in enumerate(("prefill-0", "decode-0")):
            body = {"model": "tiny", "prompt": other_prompt(index), "max_tokens": 200, "stream": True}
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S
            ) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(server.pid_of(worker), signal.SIGKILL)
                assert "data: [DONE]" in lines
            assert complete(server, PROMPT, num_tokens=200) == (expected, NUM_BLOCKS * BLOCK_SIZE)


def test_memory_in_a_file_outlives_the_node(arguments: list[str], run_dir: Path, tmp_path: Path) -> None:
    in_file = [*arguments, f"--kvcache-segment-dir={tmp_path}"]
    with ForkedServer(*in_file, run_dir=run_dir) as server:
        text, _ = complete(server, PROMPT)
        refused = subprocess.run(
            [sys.executable, "-m", "mooncake", *in_file, "--port=0"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert refused.returncode == 2
        assert f"belongs to the live process {server.process.pid}" in refused.stderr
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with ForkedServer(*in_file, run_dir=run_dir) as server:
        assert complete(server, PROMPT) == (text, NUM_BLOCKS * BLOCK_SIZE)


def test_a_server_that_is_ended_properly_finds_its_prefixes_again(
    arguments: list[str], run_dir: Path
) -> None:
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        text, _ = complete(server, PROMPT)
        assert server.stop() < STOP_DEADLINE_S
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        assert complete(server, PROMPT) == (text, NUM_BLOCKS * BLOCK_SIZE)
