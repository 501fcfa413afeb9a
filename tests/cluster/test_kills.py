"""Workers that are killed all the time: what they have not caused costs requests nothing but time."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.slowed import SlowedServer
from tests.cluster.tiny_cluster import (
    PROMPT,
    TRANSFERS,
    body,
    complete,
    is_ready,
    post,
    text_in,
    text_of,
    tiny_server,
)
from tests.deadline import DEADLINE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NUM_CLIENTS = 6
NUM_TOKENS = 80
WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
ANSWER_DEADLINE_S = 300.0


@pytest.fixture
def server(tiny: Path, run_dir: Path) -> Iterator[Server]:
    """Two instances of each role. However long they take to start, requests wait for them."""
    flags = (TRANSFERS, "--num-prefill=2", "--num-decode=2")
    patience = f"--conductor-placement-timeout-s={ANSWER_DEADLINE_S:g}"
    with tiny_server(tiny, run_dir, *flags, patience, kind=SlowedServer) as running:
        yield running


def answer_to(server: Server, prompt: list[int], over: threading.Event, *, stream: bool) -> str:
    """The text, asked for again as long as nobody is there to take the request. No other error is right."""
    asked = body(prompt=prompt, num_tokens=NUM_TOKENS, stream=stream)
    while True:
        answer = post(server, asked, timeout=ANSWER_DEADLINE_S)
        if answer.status_code != 503:
            assert answer.status_code == 200, answer.text
            return streamed_text(answer.text) if stream else text_of(answer.json())
        over.wait(float(answer.headers["Retry-After"]))


def streamed_text(content: str) -> str:
    """The text of a whole stream."""
    *events, end = [line.removeprefix("data: ") for line in content.splitlines() if line]
    assert end == "[DONE]"
    return "".join(map(text_in, events))


def num_ended(server: Server) -> dict[str, float]:
    """The number of requests by the way in which they ended.

    A client may have an answer before the Conductor is told that it has ended.
    """
    state = HTTP.get(f"{server.url}/dashboard/state", timeout=DEADLINE_S).json()
    ended: dict[str, float] = state["num_ended"]
    return ended


@pytest.mark.parametrize(
    "victims", [WORKERS, pytest.param(15 * WORKERS, marks=pytest.mark.soak)], ids=["each", "soak"]
)
def test_requests_end_once_and_as_ever_while_workers_are_killed_every_few_seconds(
    server: Server, victims: list[str]
) -> None:
    rng = random.Random(len(victims))
    prompts = [[3 + index, *PROMPT[: 10 * index]] for index in range(1, NUM_CLIENTS + 1)]
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        quiet = threads.map(lambda prompt: complete(server, prompt=prompt, num_tokens=NUM_TOKENS), prompts)
        expected = list(map(text_of, quiet))
    over = threading.Event()

    def keep_asking(index: int) -> int:
        num_answers = 0
        while not over.is_set():
            assert answer_to(server, prompts[index], over, stream=index % 2 == 0) == expected[index]
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(keep_asking, index) for index in range(NUM_CLIENTS)]
        try:
            for victim in rng.sample(victims, len(victims)):
                over.wait(rng.uniform(1.0, 3.0))
                os.kill(server.pid_of(victim), signal.SIGKILL)
        finally:
            over.set()
        num_answers = [client.result() for client in clients]
    assert all(num_answers)
    num_finished = len(expected) + sum(num_answers)
    eventually(
        lambda: num_ended(server)["finished"] == num_finished, f"{num_finished} requests have finished"
    )
    assert num_ended(server)["failed"] == 0
    eventually(lambda: is_ready(server), "all instances are back", deadline_s=ANSWER_DEADLINE_S)
