"""Context caches in a real cluster: kept under pressure while others are evicted, and over kills, and let go
at their end."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import HTTP, ROOT, Server, eventually
from tests.cluster.tiny_cluster import (
    TRANSFERS,
    cached_tokens,
    complete,
    is_ready,
    metric,
    post,
    text_of,
    tiny_server,
)
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


def call(server: Server, method: str, path: str, content: Any = None) -> Any:
    sent = HTTP.request(method, server.url + path, json=content, timeout=DEADLINE_S)
    return sent.raise_for_status().json()


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


def is_pinned(server: Server) -> bool:
    known = metric(server, "mooncake_context_cache_blocks", state="pinned")
    return known == NUM_BLOCKS == num_pins(server)


def restart_conductor(server: Server) -> None:
    """Kill the conductor, and wait for the next one."""
    killed = server.pid_of("conductor")
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: server.children().get("conductor", killed) != killed, "there is another one")
    eventually(lambda: is_ready(server), "the instances have registered")


def test_caches_outlive_the_conductor(server: Server) -> None:
    cache = call(server, "POST", "/v1/context_caches", {"name": "book", "prompt": PREFIX, "ttl": 600})
    gone = call(server, "POST", "/v1/context_caches", {"name": "gone", "prompt": other_prompt(8)})
    call(server, "DELETE", f"/v1/context_caches/{gone['id']}")
    # A Conductor that is killed before it has said so leaves these pins, for a minute.
    eventually(lambda: is_pinned(server), "nothing else is pinned")
    call(server, "POST", "/v1/context_caches", {"name": "short", "prompt": other_prompt(9), "ttl": 1})
    late = call(server, "POST", "/v1/context_caches", {"name": "late", "prompt": PREFIX})
    call(server, "DELETE", f"/v1/context_caches/{late['id']}")
    for _ in range(2):
        restart_conductor(server)
        eventually(lambda: len(call(server, "GET", "/v1/context_caches")["data"]) == 1, "the short one ends")
        [found] = call(server, "GET", "/v1/context_caches")["data"]
        assert {**found, "saved": None} == {**cache, "saved": None}
        eventually(lambda: is_pinned(server), "it is pinned where it was")
        press(server)
        assert reused(server, [5, 6], context_cache="book") == len(PREFIX)
    call(server, "DELETE", "/v1/context_caches/book")
    eventually(lambda: num_pins(server) == 0, "its pins are gone")
    restart_conductor(server)
    assert call(server, "GET", "/v1/context_caches")["data"] == []


def test_caches_outlive_the_node(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    """What was in DRAM alone is computed anew at the first use, and kept again."""
    state = f"--conductor-state-file={tmp_path / 'state.db'}"
    with tiny_server(tiny, run_dir, TRANSFERS, state) as first:
        call(first, "POST", "/v1/context_caches", {"name": "book", "prompt": PREFIX, "ttl": 600})
        answer = text_of(complete(first, prompt=[5, 6], num_tokens=8, context_cache="book"))
        for pid in (first.process.pid, *first.children().values()):
            os.kill(pid, signal.SIGKILL)
        first.process.wait(DEADLINE_S)
    with tiny_server(tiny, run_dir, TRANSFERS, state) as second:
        assert reused(second, [5, 6], context_cache="book") == 0
        eventually(lambda: is_pinned(second), "what the prompt has brought is pinned")
        assert text_of(complete(second, prompt=[5, 6], num_tokens=8, context_cache="book")) == answer
        assert reused(second, [5, 7], context_cache="book") == len(PREFIX)


def test_a_full_disk_refuses_new_caches_and_nothing_else(server: Server) -> None:
    call(server, "POST", "/v1/context_caches", {"name": "book", "prompt": PREFIX, "ttl": 600})
    conductor = server.pid_of("conductor")
    limits = resource.prlimit(conductor, resource.RLIMIT_FSIZE)
    resource.prlimit(conductor, resource.RLIMIT_FSIZE, (1, limits[1]))
    content = {"name": "other", "prompt": other_prompt(1)}
    refused = post(server, content, path="/v1/context_caches")
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "context_cache_not_stored")
    assert [cache["name"] for cache in call(server, "GET", "/v1/context_caches")["data"]] == ["book"]
    assert reused(server, [5, 6], context_cache="book") == len(PREFIX)
    assert metric(server, "mooncake_context_cache_store_failures_total") == 1
    assert server.pid_of("conductor") == conductor
    resource.prlimit(conductor, resource.RLIMIT_FSIZE, limits)
    assert post(server, content, path="/v1/context_caches").status_code == 200


def test_a_damaged_file_is_named_in_one_line(tiny: Path, run_dir: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    state.write_text("no database at all" * 100)
    with tiny_server(tiny, run_dir, f"--conductor-state-file={state}", until="^error: ") as server:
        assert server.process.wait(DEADLINE_S) == 1
    [said] = [line for line in server.lines if "state_file" in line]
    assert f"conductor.state_file {state} is damaged" in said
    assert not any("Traceback" in line for line in server.lines)
