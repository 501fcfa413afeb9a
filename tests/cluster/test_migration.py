"""Running decodes that move between instances: streams go on, and say what they say where nothing moves."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.tiny_cluster import (
    PROMPT,
    TRANSFERS,
    complete,
    is_ready,
    keep_asking,
    metric,
    post,
    streaming,
    text_in,
    text_of,
    tiny_server,
    wait_until_idle,
)
from tests.deadline import DEADLINE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
DECODES = ("decode-0", "decode-1")
INSTANCES = ("prefill-0", *DECODES)
NUM_TOKENS = 300
MOST_TOKENS = 430
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
TOOL_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 40}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": TOOL_SCHEMA}}
CHOSEN = {"temperature": 1.0, "top_k": 20}
"""A draw among few tokens hardly ever falls so near to the border of two that the last digits of logits,
which depend on the batch, decide."""
KINDS: list[dict[str, object]] = [
    {"max_tokens": NUM_TOKENS},
    {"max_tokens": NUM_TOKENS, "seed": 7, **CHOSEN},
    {"max_tokens": NUM_TOKENS, "frequency_penalty": 0.4, "presence_penalty": 0.1, "logprobs": 3},
    {"max_tokens": 100, "seed": 4, "n": 3, **CHOSEN},
    {"max_tokens": NUM_TOKENS, "repetition_penalty": 1.2, "min_tokens": 50},
    {
        "max_tokens": 150,
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
    },
    {
        "messages": [{"role": "user", "content": "f"}],
        "max_tokens": 90,
        "ignore_eos": False,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
]
"""Fields of requests whose draws depend on all that a request carries. Those with messages are chats."""


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    patience = f"--conductor-placement-timeout-s={DEADLINE_S:g}"
    flags = (TRANSFERS, "--num-decode=2", "--http-tool-parser=hermes", patience)
    with tiny_server(tiny, tmp_path_factory.mktemp("mc"), *flags) as running:
        yield running


def running_requests(server: Server) -> list[tuple[str, str]]:
    """The requests that are being decoded, and where."""
    state = HTTP.get(f"{server.url}/dashboard/state", timeout=DEADLINE_S).json()
    return [
        (shown["id"], shown["decode"])
        for shown in state["requests"]
        if not shown["is_over"] and shown["num_output_tokens"]
    ]


def move(server: Server, request_id: str, destination: str) -> httpx.Response:
    url = f"{server.url}/admin/requests/{request_id}/migrate"
    return HTTP.post(url, params={"to": destination}, timeout=DEADLINE_S)


def num_moved(server: Server) -> float:
    return metric(server, "mooncake_migrations_total", reason="by_hand", outcome="moved")


def said(answer: httpx.Response) -> list[tuple[str, str]]:
    """What each choice of an answer says or calls, and how it ended."""
    assert answer.status_code == 200, answer.text
    return [(_text(choice), choice["finish_reason"]) for choice in answer.json()["choices"]]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    [call] = choice["message"]["tool_calls"]
    return str(call["function"]["arguments"])


def logprobs_of(answer: httpx.Response) -> list[float]:
    """The logprobs of the tokens of the first choice; none if they were not asked for."""
    found = answer.json()["choices"][0]["logprobs"] or {}
    return list(found.get("token_logprobs", ()))


def other_than(instance: str) -> str:
    return DECODES[1 - DECODES.index(instance)]


class Mover:
    """Moves requests at random, as long as the block runs."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server, self._rng = server, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            running = running_requests(self._server)
            if running:
                request_id, here = self._rng.choice(running)
                answer = move(self._server, request_id, other_than(here))
                # It may have ended or moved meanwhile, or its destination may be gone.
                assert answer.status_code in (200, 404, 409, 503), answer.text
            self._over.wait(self._rng.uniform(0.0, 0.05))


def ask(server: Server, index: int, kind: dict[str, object]) -> httpx.Response:
    """The answer to a request of a kind, with a prompt of its own."""
    content: dict[str, object] = {"model": "tiny", "temperature": 0, "ignore_eos": True} | kind
    path = "/v1/chat/completions"
    if "messages" not in kind:
        content["prompt"], path = [3 + index, *PROMPT[: 12 * index]], "/v1/completions"
    return post(server, content, path=path)


def ask_all(server: Server, kinds: list[dict[str, object]], num_rounds: int = 1) -> list[httpx.Response]:
    """The answers to requests of these kinds, some at once; the same ones in each round."""
    with ThreadPoolExecutor(len(kinds)) as threads:
        rounds = [*enumerate(kinds)] * num_rounds
        return list(threads.map(lambda numbered: ask(server, *numbered), rounds))


@pytest.mark.parametrize("num_rounds", [2, pytest.param(100, marks=pytest.mark.soak)])
def test_answers_are_the_same_wherever_they_are_decoded(server: Server, num_rounds: int) -> None:
    [(text, _)] = said(ask(server, 0, KINDS[0]))
    stop = {**KINDS[0], "stop": text[-40:-30]}
    kinds = [stop, *KINDS]
    expected = ask_all(server, kinds)
    assert said(expected[0])[0][1] == "stop"
    num_before = num_moved(server)
    with Mover(server, seed=num_rounds):
        answers = ask_all(server, kinds, num_rounds)
    for answer, plain in zip(answers, expected * num_rounds, strict=True):
        assert said(answer) == said(plain)
        assert logprobs_of(answer) == pytest.approx(logprobs_of(plain), abs=1e-4)
    assert num_moved(server) > num_before
    wait_until_idle(server, instances=INSTANCES)


def test_streams_go_on_in_order_through_moves(server: Server) -> None:
    expected = text_of(complete(server, num_tokens=MOST_TOKENS))
    deadline_s, num_before = time.monotonic() + DEADLINE_S, num_moved(server)
    while num_moved(server) < num_before + 5:
        assert time.monotonic() < deadline_s
        text = ""
        with streaming(server, num_tokens=MOST_TOKENS) as events:
            for index, event in enumerate(events):
                text += text_in(event)
                if index % 60 == 30:
                    for request_id, here in running_requests(server):
                        move(server, request_id, other_than(here))
        assert text == expected
    wait_until_idle(server, instances=INSTANCES)


def test_requests_that_cannot_move_are_told_why(server: Server) -> None:
    assert move(server, "no-such-request", "decode-1").status_code == 404
    for destination, reason in ((None, None), ("prefill-0", "decode"), ("nobody", "nobody")):
        eventually(lambda d=destination, r=reason: is_told(server, d, r), f"told why not to {destination}")


def is_told(server: Server, destination: str | None, reason: str | None) -> bool:
    """Whether a new request is told why it does not move, to `destination` or to where it is; not if it has
    ended before."""
    with streaming(server, num_tokens=MOST_TOKENS) as events:
        next(events)
        running = running_requests(server)
        if len(running) != 1:
            return False
        [(request_id, here)] = running
        answer = move(server, request_id, destination or here)
    assert answer.status_code in (404, 409), answer.text
    return (reason or here) in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_kills", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_kills_while_requests_move_change_no_answer(server: Server, num_kills: int) -> None:
    prompts = [[3 + index, *PROMPT[: 10 * index]] for index in range(1, 7)]
    expected = [text_of(complete(server, prompt=prompt, num_tokens=NUM_TOKENS)) for prompt in prompts]
    over, rng = threading.Event(), random.Random(num_kills)

    with ThreadPoolExecutor(len(prompts)) as threads:
        with Mover(server, seed=num_kills):
            clients = [
                threads.submit(keep_asking, server, over, text, prompt=prompt, num_tokens=NUM_TOKENS)
                for prompt, text in zip(prompts, expected, strict=True)
            ]
            try:
                for _ in range(num_kills):
                    over.wait(rng.uniform(0.5, 2.0))
                    names = [name for name in server.children() if name.startswith("decode-")]
                    if names:
                        os.kill(server.children()[rng.choice(names)], signal.SIGKILL)
            finally:
                over.set()
        for client in clients:
            assert client.result()
    eventually(lambda: is_ready(server), "all instances are back")
    wait_until_idle(server, instances=INSTANCES)
