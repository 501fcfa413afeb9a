"""Clients that leave and processes that die while the cluster works."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import (
    NUM_PAGES,
    PROMPT,
    TRANSFERS,
    body,
    cached_tokens,
    complete,
    is_ready,
    kill_at_random,
    metric,
    post,
    streaming,
    text_in,
    text_of,
    tiny_server,
    wait_until_idle,
)
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
OTHER = [token + 1 for token in PROMPT]


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A pair that comes back from all that happens to it."""
    with tiny_server(tiny, tmp_path_factory.mktemp("mc"), TRANSFERS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Server) -> tuple[str, str]:
    """The answers to `PROMPT` and to `OTHER` where nothing happens."""
    return text_of(complete(server)), text_of(complete(server, prompt=OTHER))


@pytest.mark.parametrize("name", ["prefill-0", "prefill-0/messenger", "decode-0", "decode-0/messenger"])
def test_a_killed_process_changes_no_token(server: Server, expected: tuple[str, str], name: str) -> None:
    died = rf"\[{name}\] died \(signal 9\)"
    pid, num_deaths = server.pid_of(name), server.num_lines(died)
    with streaming(server) as events:
        text = text_in(next(events))
        os.kill(pid, signal.SIGKILL)
        with ThreadPoolExecutor(1) as thread:
            beside = thread.submit(complete, server, prompt=OTHER)
            *others, end = events
            assert text_of(beside.result()) == expected[1]
    assert (text + "".join(map(text_in, others)), end) == (expected[0], "[DONE]")
    assert text_of(complete(server)) == expected[0]
    server.wait_for_line(died, num_deaths + 1)
    wait_until_idle(server)


def test_a_killed_conductor_loses_what_runs_and_nothing_else(tiny: Path, run_dir: Path) -> None:
    with tiny_server(tiny, run_dir, TRANSFERS) as server:
        expected = text_of(complete(server))
        with streaming(server) as events:
            next(events)
            os.kill(server.pid_of("conductor"), signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(events)
        eventually(lambda: is_ready(server), "workers have registered with the next conductor")
        eventually(
            lambda: metric(server, "mooncake_index_keys") >= 72 // 8, "it has asked the pools what they hold"
        )
        again = complete(server)
        assert (text_of(again), cached_tokens(again)) == (expected, 72)
        wait_until_idle(server)


def test_a_request_in_whose_passes_a_worker_fails_again_and_again_ends_with_an_error(
    tmp_path: Path, run_dir: Path
) -> None:
    """A fault is a process's own, unlike a kill: its next life says in whose pass it was.

    Decode is in a pass nearly all the time: the model has many layers, and a life's first token, which is
    prefill's, has come by then.
    """
    directory, num_layers = tmp_path / "tiny", 64
    tiny_model("smollm2", directory, num_hidden_layers=num_layers)
    write_tiny_tokenizer(directory)
    error, num_events, faulted = "", Counter[int](), set[int]()
    with tiny_server(directory, run_dir, TRANSFERS) as server:
        expected = text_of(complete(server, prompt=OTHER, num_tokens=20))
        with streaming(server) as events:
            for event in events:
                if '"error"' in event:
                    error = event
                elif event != "[DONE]":  # some are read when the life that sent them has ended
                    decode = server.pid_of("decode-0")
                    num_events[decode] += 1
                    if num_events[decode] == 5:
                        os.kill(decode, signal.SIGSEGV)
                        faulted.add(decode)
        assert "the instances that computed it have failed: decode-0, decode-0, decode-0" in error
        assert len(faulted) >= 3
        assert text_of(complete(server, prompt=OTHER, num_tokens=20)) == expected
        wait_until_idle(server, num_pages=NUM_PAGES * 4 // num_layers)


def test_sealed_blocks_outlive_their_worker_and_their_messenger(server: Server) -> None:
    def cached() -> int:
        return cached_tokens(complete(server, num_tokens=2, cache_salt="of this test"))

    assert cached() == 0
    assert cached() == 72
    ready = r"\[prefill-0\] ready"
    for name in ("prefill-0", "prefill-0/messenger"):
        num_sessions = server.num_lines(ready)  # a busy machine may have lost one
        os.kill(server.pid_of(name), signal.SIGKILL)
        server.wait_for_line(ready, count=num_sessions + 1)
        assert cached() == 72


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_everything(server: Server, stream: bool) -> None:
    complete(server, num_tokens=1)
    for _ in range(3):
        if stream:
            with streaming(server) as events:
                next(events)
        else:
            hurried = httpx.Timeout(DEADLINE_S, read=0.1)  # 430 tokens take longer
            with pytest.raises(httpx.ReadTimeout):
                post(server, body(num_tokens=430), timeout=hurried)
    wait_until_idle(server)


def test_preempted_requests_finish_unchanged(tiny: Path, run_dir: Path) -> None:
    prompts = [[3 + index, *PROMPT[:30]] for index in range(6)]
    # 20 pages of 8 tokens: two of these sequences at their full length of 71 tokens, never six.
    page_bytes = 8 * 4 * 1 * 2 * 16 * 4
    with tiny_server(tiny, run_dir, TRANSFERS, f"--kvcache-device-bytes={20 * page_bytes}") as server:
        expected = [text_of(complete(server, prompt=prompt, num_tokens=40)) for prompt in prompts]
        with ThreadPoolExecutor(6) as threads:
            answers = threads.map(lambda prompt: complete(server, prompt=prompt, num_tokens=40), prompts)
            assert [text_of(answer) for answer in answers] == expected


@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_random_kills_never_change_a_text(server: Server, num_kills: int) -> None:
    prompts = [[3 + index, *PROMPT[: 10 * index]] for index in range(1, 7)]
    kill_at_random(server, prompts, num_tokens=100, num_kills=num_kills)
