"""Clusters of a tiny model: how tests start them, send requests, and read what they show of themselves."""

import contextlib
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import serving
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import HTTP, Server, eventually
from tests.deadline import DEADLINE_S

ONE_THREAD = "--worker-num-threads=1"
"""The flag of all nodes of a tiny model for a single thread.

Otherwise torch would use all cores in each node, and threads that wait for those of other nodes would make
iterations ten times as long on a busy machine.
"""
SMALL = ("--kvcache-block-size=8", "--kvcache-pool-bytes=8MiB", "--kvcache-device-bytes=8MiB", ONE_THREAD)
NUM_PAGES = (8 << 20) // (8 * 4 * 1 * 2 * 16 * 4)
"""The number of device pages of an instance.

It has 8 MiB, for blocks of 8 tokens x 4 layers x 1 head x (K, V) x 16 x 4 bytes.
"""
PROMPT = list(range(3, 80))
NUM_TOKENS = 300
PAIR, PAIR_FLAGS = ("prefill-0", "decode-0"), serving.PAIR
"""The instances of a pair, and the flags of a server that has them."""


def tiny_server(
    model: Path,
    run_dir: Path,
    *arguments: str,
    until: str = "^ready in",
    kind: type[ForkedServer] = ForkedServer,
) -> ForkedServer:
    """Return a server of `model` in float32 with small pools. `arguments` can override this.

    The server is a pair, unless `arguments` name a role or numbers of instances.
    """
    return kind(f"--model={model}", *SMALL, *serving.paired(arguments), run_dir=run_dir, until=until)


# -- requests ---------------------------------------------------------------------------------------


def body(prompt: list[int] = PROMPT, num_tokens: int = NUM_TOKENS, **fields: object) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def post(
    server: Server,
    content: dict[str, object],
    timeout: float | None = None,
    path: str = "/v1/completions",
    **options: Any,
) -> httpx.Response:
    """Send a request, and return the response.

    Without a `timeout` the test's deadline counts. If the response misses it, the error has the state of the
    cluster.
    """
    url = f"{server.url}{path}"
    try:
        return HTTP.post(url, json=content, timeout=timeout or DEADLINE_S, **options)
    except httpx.TimeoutException as late:
        if timeout is None:
            late.add_note(_what_it_says(server))
        raise


def _what_it_says(server: Server) -> str:
    """Return the server's state, as its dashboard shows it, and all of its output."""
    try:
        state = json.dumps(HTTP.get(f"{server.url}/dashboard/state", timeout=5).json(), indent=1)
    except (httpx.HTTPError, ValueError) as error:
        state = repr(error)
    return "\n".join([f"/dashboard/state: {state}", *server.lines])


def complete(server: Server, **fields: object) -> dict[str, Any]:
    """Send a completion request of these fields (`body`), and return the answer. Its status must be 200."""
    answer = post(server, body(**fields))  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def keep_asking(server: Server, over: threading.Event, expected: str, **fields: object) -> int:
    """Send a completion request of these fields again and again, until `over` is set and there was an answer.

    Every answer must have the expected text. After a 503 the client waits for `Retry-After`. Returns the
    number of answers.
    """
    num_answers = 0
    while not (over.is_set() and num_answers):
        answer = post(server, body(**fields))  # type: ignore[arg-type]
        if answer.status_code == 503:
            over.wait(float(answer.headers["Retry-After"]))
            continue
        assert answer.status_code == 200, answer.text
        assert text_of(answer.json()) == expected
        num_answers += 1
    return num_answers


def text_of(answer: dict[str, Any]) -> str:
    [choice] = answer["choices"]
    return str(choice["text"])


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextlib.contextmanager
def streaming(server: Server, **fields: object) -> Iterator[Iterator[str]]:
    """Make a context with an iterator over the events of a streamed answer, as they arrive."""
    content = body(stream=True, **fields)  # type: ignore[arg-type]
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=content, timeout=DEADLINE_S) as response:
        assert response.status_code == 200, response.read()
        yield (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


def text_in(event: str) -> str:
    """Return the text in one event of a stream; empty for the last event."""
    choices = [] if event == "[DONE]" else httpx.Response(200, text=event).json()["choices"]
    return "".join(choice["text"] for choice in choices)


# -- what is seen from outside ----------------------------------------------------------------------


def is_ready(server: Server) -> bool:
    try:
        return HTTP.get(f"{server.url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def metric(server: Server, name: str, **labels: str) -> float:
    """Return the value of a counter or gauge; 0 if it was not reported yet."""
    text = HTTP.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    lines = "".join(line for line in text.splitlines(keepends=True) if line.startswith(name))
    found = (sample for family in text_string_to_metric_families(lines) for sample in family.samples)
    return next((of.value for of in found if of.name == name and of.labels == labels), 0.0)


def samples(server: Server, *names: str) -> list[dict[str, float]]:
    """Return for each metric the values of its samples by their labels, all from one scrape."""
    text = HTTP.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    found = [re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE) for name in names]
    return [{labels: float(value) for labels, value in of_metric} for of_metric in found]


TRANSFERS = "--conductor-inlining=false"
"""The flag for tests of pairs. Without it an idle decode instance would compute prompts itself."""


def wait_until_idle(
    server: Server, num_stages: int = 1, num_pages: int = NUM_PAGES, instances: Sequence[str] = PAIR
) -> None:
    """Wait until no request is known in the cluster, all device pages are free, and no pool page is in use.

    A stage has more, smaller pages; only the first instance may have several stages.
    """
    expected = dict.fromkeys((f'instance="{name}"' for name in instances), num_pages)
    expected[f'instance="{instances[0]}"'] = num_stages * num_pages
    num_pools = num_stages + len(instances) - 1

    def is_idle() -> bool:
        states, free, users, pages, orphaned = samples(
            server,
            "mooncake_requests_by_state",
            "mooncake_instance_free_device_pages",
            "mooncake_pool_users",
            "mooncake_pool_pages",
            "mooncake_pool_orphaned_pages",
        )
        in_use = [number for labels, number in pages.items() if re.search("reserved|quarantined", labels)]
        are_all_there = (len(users), len(in_use), len(orphaned)) == (3 * num_pools, 2 * num_pools, num_pools)
        held = [*states.values(), *users.values(), *in_use, *orphaned.values()]
        return free == expected and are_all_there and not any(held)

    eventually(is_idle, "every page and request is given back")


# -- kills ------------------------------------------------------------------------------------------


def kill_at_random(
    server: Server,
    prompts: Sequence[list[int]],
    num_tokens: int,
    num_kills: int,
    num_stages: int = 1,
    hang_ups: float = 0.0,
    instances: Sequence[str] = PAIR,
) -> None:
    """Kill workers and messengers at random moments, while clients send all prompts again and again.

    All answers must be right, and nothing may stay held. Clients hang up at once in the share `hang_ups` of
    all requests.
    """
    rng, over = random.Random(num_kills), threading.Event()
    expected = [text_of(complete(server, prompt=prompt, num_tokens=num_tokens)) for prompt in prompts]

    def keep_asking(index: int) -> None:
        num_answers, draw = 0, random.Random(index)
        while not (over.is_set() and num_answers):
            if draw.random() < hang_ups:
                with contextlib.suppress(httpx.TimeoutException):
                    post(server, body(prompts[index], num_tokens=100), timeout=0.05)
                continue
            answer = post(server, body(prompts[index], num_tokens))
            if answer.status_code == 200:
                assert text_of(answer.json()) == expected[index]
                num_answers += 1
            else:
                assert answer.status_code in (500, 503), answer.text
                assert "error" in answer.json()

    with ThreadPoolExecutor(len(prompts)) as threads:
        clients = [threads.submit(keep_asking, index) for index in range(len(prompts))]
        for _ in range(num_kills):
            over.wait(rng.uniform(0.2, 3.0))
            victims = [pid for name, pid in server.children().items() if name != "conductor"]
            if victims:
                os.kill(rng.choice(victims), signal.SIGKILL)
        over.set()
        for client in clients:
            client.result()
    eventually(lambda: is_ready(server), "all instances are back")
    assert [text_of(complete(server, prompt=prompt, num_tokens=num_tokens)) for prompt in prompts] == expected
    wait_until_idle(server, num_stages, instances=instances)
