"""Context caches in a real cluster: kept under pressure while others are evicted, and let go at their end."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import ROOT, Server, eventually
from tests.cluster.test_pool import metric
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
BLOCK_SIZE = 8
NUM_BLOCKS = 9
PREFIX = list(range(3, 3 + NUM_BLOCKS * BLOCK_SIZE))


@pytest.fixture
def server(tmp_path: Path, run_dir: Path) -> Any:
    """A tiny model, DRAM for few prompts and no SSD."""
    directory = tmp_path / "tiny"
    tiny_model("smollm2", directory)
    write_tiny_tokenizer(directory)
    arguments = [f"--model={directory}", f"--kvcache-block-size={BLOCK_SIZE}"]
    arguments += ["--kvcache-pool-bytes=200KiB", "--kvcache-device-bytes=8MiB"]
    with ForkedServer(*arguments, run_dir=run_dir) as started:
        yield started


def call(server: Server, method: str, path: str, body: Any = None) -> Any:
    return httpx.request(method, server.url + path, json=body, timeout=DEADLINE_S).raise_for_status().json()


def cached_tokens(server: Server, prompt: list[int], **fields: Any) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = call(server, "POST", "/v1/completions", {**body, **fields})
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def other_prompt(number: int) -> list[int]:
    return [3 + (token + 7 * number) % 90 for token in range(1, NUM_BLOCKS * BLOCK_SIZE + 2)]


def press(server: Server) -> None:
    """Prompts that are several times what DRAM holds; each evicts others."""
    for number in range(1, 8):
        assert cached_tokens(server, other_prompt(number)) == 0


def num_pins(server: Server) -> float:
    return metric(server, "mooncake_pool_users", instance="prefill-0", kind="pins")


def test_a_cache_outlives_pressure_until_it_is_deleted(server: Server, tmp_path: Path) -> None:
    cache = call(server, "POST", "/v1/context_caches", {"name": "book", "prompt": PREFIX, "ttl": 600})
    assert (cache["status"], cache["tokens"]) == ("ready", len(PREFIX))
    eventually(lambda: num_pins(server) == NUM_BLOCKS, "its blocks are pinned")
    eventually(
        lambda: metric(server, "mooncake_context_cache_blocks", state="pinned") == NUM_BLOCKS,
        "the Conductor knows it",
    )
    press(server)
    evicted = {"instance": "prefill-0", "tier": "dram", "policy": "lru"}
    eventually(lambda: metric(server, "mooncake_pool_evictions_total", **evicted) > 0, "others are evicted")
    assert cached_tokens(server, [5, 6], context_cache="book") == len(PREFIX)
    assert cached_tokens(server, [*PREFIX, 5, 7]) == len(PREFIX), (
        "it is the same KVCache as that of the tokens"
    )
    saved = call(server, "GET", "/v1/context_caches/book")["saved"]
    assert (saved["prompts"], saved["tokens"]) == (1, len(PREFIX))
    assert saved["prefill_seconds"] > 0
    call(server, "DELETE", f"/v1/context_caches/{cache['id']}")
    eventually(lambda: num_pins(server) == 0, "its pins are gone")
    press(server)
    assert cached_tokens(server, [*PREFIX, 5, 8]) == 0

    # What ends by itself, and what nothing is left of, is computed again and kept again.
    call(server, "POST", "/v1/context_caches", {"name": "short", "prompt": PREFIX, "ttl": 1})
    eventually(lambda: num_pins(server) == 0, "pins end with the time to live")
    example = [sys.executable, str(ROOT / "docs/examples/context_cache.py"), server.url]
    (tmp_path / "text").write_text("a text " * 20)
    done = subprocess.run(
        [*example, str(tmp_path / "text")], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert "'prompts': 2" in done.stdout
