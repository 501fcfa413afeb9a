"""Context caches in a real cluster: kept under pressure while others are evicted, and let go at their end."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.harness import ROOT, Server, eventually
from tests.cluster.tiny_cluster import TRANSFERS, cached_tokens, complete, metric, tiny_server
from tests.deadline import DEADLINE_S

pytestmark = pytest.mark.cluster
BLOCK_SIZE = 8
NUM_BLOCKS = 9
PREFIX = list(range(3, 3 + NUM_BLOCKS * BLOCK_SIZE))


@pytest.fixture
def server(tiny: Path, run_dir: Path) -> Iterator[Server]:
    """DRAM for few prompts and no SSD."""
    with tiny_server(tiny, run_dir, TRANSFERS, "--kvcache-pool-bytes=200KiB") as started:
        yield started


def call(server: Server, method: str, path: str, body: Any = None) -> Any:
    return httpx.request(method, server.url + path, json=body, timeout=DEADLINE_S).raise_for_status().json()


def reused(server: Server, prompt: list[int], **fields: Any) -> int:
    """How many tokens of this prompt, and of its context cache, the pool held."""
    return cached_tokens(complete(server, prompt=prompt, num_tokens=2, **fields))


def other_prompt(number: int) -> list[int]:
    return [3 + (token + 7 * number) % 90 for token in range(1, NUM_BLOCKS * BLOCK_SIZE + 2)]


def press(server: Server) -> None:
    """Prompts that are several times what DRAM holds; each evicts others."""
    for number in range(1, 8):
        assert reused(server, other_prompt(number)) == 0


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
    assert reused(server, [5, 6], context_cache="book") == len(PREFIX)
    assert reused(server, [*PREFIX, 5, 7]) == len(PREFIX), "it is the same KVCache as that of the tokens"
    saved = call(server, "GET", "/v1/context_caches/book")["saved"]
    assert (saved["prompts"], saved["tokens"]) == (1, len(PREFIX))
    assert saved["prefill_seconds"] > 0
    call(server, "DELETE", f"/v1/context_caches/{cache['id']}")
    eventually(lambda: num_pins(server) == 0, "its pins are gone")
    press(server)
    assert reused(server, [*PREFIX, 5, 8]) == 0

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
