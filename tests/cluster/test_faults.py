"""Clients that leave and processes that die while the cluster works."""

import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import Server, eventually
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
PROMPT = list(range(3, 80))
NUM_TOKENS = 300


@pytest.fixture
def server(tmp_path: Path, run_dir: Path) -> Iterator[Server]:
    """A tiny model in float32, small pools."""
    directory = tmp_path / "tiny"
    tiny_model("smollm2", directory)
    write_tiny_tokenizer(directory)
    arguments = ["--model", str(directory), "--kvcache-block-size=8"]
    sizes = ["--kvcache-pool-bytes=8MiB", "--kvcache-device-bytes=8MiB"]
    with ForkedServer(*arguments, *sizes, run_dir=run_dir) as running:
        yield running


def body(prompt: list[int] = PROMPT, num_tokens: int = NUM_TOKENS, **fields: object) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def complete(server: Server, **fields: object) -> dict[str, object]:
    answer = httpx.post(f"{server.url}/v1/completions", json=body(**fields), timeout=DEADLINE_S)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    content: dict[str, object] = answer.json()
    return content


def text_of(answer: dict[str, object]) -> str:
    [choice] = answer["choices"]  # type: ignore[misc]
    return str(choice["text"])


def cached_tokens(answer: dict[str, object]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])  # type: ignore[index]


def is_ready(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def metric(server: Server, name: str) -> float | None:
    """A sample's value; None before the first heartbeat of an instance."""
    for line in httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[-1])
    return None


def samples(server: Server, *names: str) -> list[dict[str, float]]:
    """Of each metric, by labels, all of one moment."""
    text = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    found = [re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE) for name in names]
    return [{labels: float(value) for labels, value in of_metric} for of_metric in found]


def wait_until_idle(server: Server, num_stages: int = 1) -> None:
    """No request is known anywhere, all device pages are free again, and no page of a pool is in use. A stage
    has more, smaller pages."""
    expected = {'instance="prefill-0"': num_stages * TOTAL_PAGES, 'instance="decode-0"': TOTAL_PAGES}
    num_pools = num_stages + 1

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


# 8 MiB of blocks of 8 tokens x 4 layers x 1 head x (K, V) x 16 x 4 bytes.
TOTAL_PAGES = float((8 << 20) // (8 * 4 * 1 * 2 * 16 * 4))


@pytest.mark.parametrize("name", ["prefill-0", "prefill-0/messenger", "decode-0", "decode-0/messenger"])
def test_a_killed_process_changes_no_token(server: Server, name: str) -> None:
    expected = text_of(complete(server))
    other = [token + 1 for token in PROMPT]
    expected_other = text_of(complete(server, prompt=other))
    pid = server.pid_of(name)
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGKILL)
            with ThreadPoolExecutor(1) as thread:
                beside = thread.submit(complete, server, prompt=other)
                assert "[DONE]" in [line.removeprefix("data: ") for line in lines]
                assert text_of(beside.result()) == expected_other
        assert text_of(complete(server)) == expected
    server.wait_for_line(rf"\[{name}\] died \(signal 9\)")
    wait_until_idle(server)


def test_a_killed_conductor_loses_what_runs_and_nothing_else(server: Server) -> None:
    expected = text_of(complete(server))
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body(stream=True), timeout=DEADLINE_S
    ) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(server.pid_of("conductor"), signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
    eventually(lambda: is_ready(server), "workers have registered with the next conductor")
    eventually(
        lambda: (metric(server, "mooncake_index_keys") or 0) >= 72 // 8,
        "it has asked the pools what they hold",
    )
    again = complete(server)
    assert text_of(again) == expected
    assert cached_tokens(again) == 72
    wait_until_idle(server)


def test_streamed_text_survives_the_death_of_its_decode_worker(server: Server) -> None:
    expected = text_of(complete(server))
    decode = server.pid_of("decode-0")
    text = ""
    killed = False
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body(stream=True), timeout=DEADLINE_S
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = httpx.Response(200, text=line.removeprefix("data: ")).json()
            text += "".join(choice["text"] for choice in chunk["choices"])
            if not killed and text:
                os.kill(decode, signal.SIGKILL)
                killed = True
    assert killed
    assert text == expected


def test_a_request_in_whose_passes_a_worker_fails_again_and_again_ends_with_an_error(server: Server) -> None:
    """A fault is a process's own, unlike a kill: its next life says in whose pass it was."""
    other = [token + 1 for token in PROMPT]
    expected = text_of(complete(server, prompt=other))
    error, faulted = "", set[int]()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body(stream=True), timeout=DEADLINE_S
    ) as response:
        for line in response.iter_lines():
            if '"error"' in line:
                error = line
            elif line.startswith("data: {"):  # some are read when the life that sent them has ended
                decode = server.pid_of("decode-0")
                if decode not in faulted:
                    os.kill(decode, signal.SIGSEGV)
                    faulted.add(decode)
    assert "the instances that computed it have failed: decode-0, decode-0, decode-0" in error
    assert len(faulted) >= 3
    assert text_of(complete(server, prompt=other)) == expected
    wait_until_idle(server)


def test_sealed_blocks_outlive_their_worker_and_their_messenger(server: Server) -> None:
    def cached() -> int:
        return cached_tokens(complete(server, num_tokens=2))

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
        with (
            httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client,
            pytest.raises(httpx.ReadTimeout) if not stream else httpx.Client(),
        ):
            if stream:
                with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
                    next(response.iter_lines())
            else:
                hurried = httpx.Timeout(DEADLINE_S, read=0.1)  # 430 tokens take longer
                client.post("/v1/completions", json=body(num_tokens=430), timeout=hurried)
    wait_until_idle(server)


def test_preempted_requests_finish_unchanged(tmp_path: Path, run_dir: Path) -> None:
    directory = tmp_path / "tiny"
    tiny_model("smollm2", directory)
    write_tiny_tokenizer(directory)
    prompts = [[3 + index, *PROMPT[:30]] for index in range(6)]
    # 20 pages of 8 tokens: two of these sequences at their full length of 71 tokens, never six.
    page_bytes = 8 * 4 * 1 * 2 * 16 * 4
    arguments = ["--model", str(directory), "--kvcache-block-size=8", "--kvcache-pool-bytes=8MiB"]
    with ForkedServer(*arguments, f"--kvcache-device-bytes={20 * page_bytes}", run_dir=run_dir) as server:
        expected = [text_of(complete(server, prompt=prompt, num_tokens=40)) for prompt in prompts]
        with ThreadPoolExecutor(6) as threads:
            answers = threads.map(lambda prompt: complete(server, prompt=prompt, num_tokens=40), prompts)
            assert [text_of(answer) for answer in answers] == expected


@pytest.mark.parametrize(
    "num_kills", [3, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_random_kills_never_change_a_text(server: Server, num_kills: int) -> None:
    """Workers and messengers die at random moments; what is answered is right, and nothing stays held."""
    rng = random.Random(num_kills)
    prompts = [[3 + index, *PROMPT[: 10 * index]] for index in range(1, 7)]
    expected = [text_of(complete(server, prompt=prompt, num_tokens=100)) for prompt in prompts]
    over = threading.Event()

    def keep_asking(index: int) -> None:
        num_answers = 0
        while not (over.is_set() and num_answers):
            answer = httpx.post(
                f"{server.url}/v1/completions",
                json=body(prompt=prompts[index], num_tokens=100),
                timeout=DEADLINE_S,
            )
            if answer.status_code == 200:
                assert text_of(answer.json()) == expected[index]
                num_answers += 1
            else:
                assert answer.status_code in (500, 503), answer.text
                assert "error" in answer.json()

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = [threads.submit(keep_asking, index) for index in range(len(prompts))]
        for _ in range(num_kills):
            over.wait(rng.uniform(0.2, 3.0))
            victims = [pid for name, pid in server.children().items() if name != "conductor"]
            if victims:
                os.kill(rng.choice(victims), signal.SIGKILL)
        over.set()
        for answer in answers:
            answer.result()
    eventually(lambda: is_ready(server), "all instances are back")
    assert [text_of(complete(server, prompt=prompt, num_tokens=100)) for prompt in prompts] == expected
    wait_until_idle(server)
