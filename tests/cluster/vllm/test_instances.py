"""vLLM servers as instances under our Conductor: the tokens of vLLM alone, whatever happens."""

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mooncake.security.keys import ClusterKey
from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import PAIR_FLAGS, TRANSFERS, body, metric, samples, streaming
from tests.cluster.vllm.server import TINY_OPTIONS, VllmServer, draw_prompts, vllm_command
from tests.deadline import DEADLINE_S
from tests.ports import free_port
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3600)]
START_S = 3 * DEADLINE_S
NUM_TOKENS = 24
ENGINE, SERVER = "VLLM::Engine", "vllm"
"""beginnings of the titles of vLLM's processes"""
SMALL = ("--dtype=float32", "--kvcache-pool-bytes=32MiB", "--kvcache-device-bytes=64MiB")
_draw = random.Random(5)
PROMPTS = draw_prompts(_draw, 12, range(20, 300), range(3, VOCAB_SIZE))
PROMPTS += [[*prompt, *_draw.choices(range(3, VOCAB_SIZE), k=40)] for prompt in PROMPTS[:4]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that vLLM and we read, with a tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("qwen3", directory, max_position_embeddings=2048)
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def expected(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM answers without a connector."""
    with VllmServer(tiny, tmp_path_factory.mktemp("alone") / "log", *TINY_OPTIONS).start() as alone:
        return [alone.complete(prompt, NUM_TOKENS) for prompt in PROMPTS]


def by_vllm(folder: Path) -> list[str]:
    """Flags of nodes whose engine is vLLM."""
    options = "--vllm-options=--enforce-eager,--max-model-len,2048"
    return ["--engine=vllm", f"--vllm-command={vllm_command(folder)}", options]


def tokens(server: Server, prompt: list[int], num_tokens: int = NUM_TOKENS, **fields: object) -> list[int]:
    content = body(prompt, num_tokens, return_token_ids=True, **fields)
    answer = httpx.post(f"{server.url}/v1/completions", json=content, timeout=START_S)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def answers(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda prompt: tokens(server, prompt), PROMPTS))


def free_device_pages(server: Server, num_instances: int) -> dict[str, float]:
    """The pages of each idle instance, as soon as all have told theirs."""
    found: list[dict[str, float]] = []

    def are_told() -> bool:
        found[:] = samples(server, "mooncake_instance_free_device_pages")
        return len(found[0]) == num_instances

    eventually(are_told, "all instances have told their pages")
    return found[0]


def wait_until_idle(server: Server, free_pages: dict[str, float]) -> None:
    def is_idle() -> bool:
        states, free, users = samples(
            server,
            "mooncake_requests_by_state",
            "mooncake_instance_free_device_pages",
            "mooncake_pool_users",
        )
        return free == free_pages and not any([*states.values(), *users.values()])

    eventually(is_idle, "every page and request is given back")


@pytest.fixture
def pair(tiny: Path, run_dir: Path, tmp_path: Path) -> Iterator[Server]:
    patient = f"--conductor-placement-timeout-s={START_S:g}"  # vLLM takes a minute to start again
    flags = ["--model", str(tiny), *SMALL, *PAIR_FLAGS, TRANSFERS, patient, "--hang-timeout-s=6"]
    server = Server(*flags, *by_vllm(tmp_path), run_dir=run_dir)
    try:
        server.start().wait_for_line("^ready in", deadline_s=START_S)
        yield server
    finally:
        server.stop()


def test_modules_neither_leave_nor_come(pair: Server) -> None:
    order = f"{pair.url}/admin/instances/decode-0/layers?to=prefill-0&layers=0:1"
    refused = httpx.post(order, timeout=DEADLINE_S)
    assert refused.json()["error"]["message"] == (
        "layers neither leave nor come to decode-0: vLLM computes this model"
    )


def test_prompts_are_prefilled_by_one_and_decoded_by_another(pair: Server, expected: list[list[int]]) -> None:
    free_pages = free_device_pages(pair, 2)
    assert answers(pair) == expected
    assert answers(pair) == expected, "from the pools and vLLM's own prefix caches"
    eventually(
        lambda: all(
            metric(pair, "mooncake_index_blocks", instance=name, tier="device") > 0
            for name in ("prefill-0", "decode-0")
        ),
        "the Conductor knows what the engines hold",
    )
    eventually(
        lambda: metric(pair, "mooncake_prefill_tokens_total", instance="prefill-0", source="device") > 0,
        "some of it was not computed again",
    )
    assert [tokens(pair, prompt, user="someone", cache_salt="secret") for prompt in PROMPTS[:2]] == expected[
        :2
    ]
    assert metric(pair, "mooncake_ended_requests_total", outcome="failed") == 0
    wait_until_idle(pair, free_pages)
    # A client that goes away ends its answer in vLLM.
    with streaming(pair, prompt=PROMPTS[0], num_tokens=700) as events:
        next(iter(events))
    wait_until_idle(pair, free_pages)
    # What vLLM cannot continue elsewhere is refused by name.
    refused = httpx.post(
        f"{pair.url}/v1/completions", json=body(PROMPTS[0], 4, presence_penalty=1.0), timeout=START_S
    )
    assert refused.status_code == 400
    assert "presence_penalty" in refused.text
    # Both engines are killed in mid-answer.
    for name in ("decode-0", "prefill-0"):
        assert answers_around_a_signal(pair, name, ENGINE, signal.SIGKILL) == expected[:4]
    assert answers(pair) == expected


def test_engines_and_servers_that_hang_are_started_again(pair: Server, expected: list[list[int]]) -> None:
    """Requests may be refused while no instance of a role is left: clients ask again."""
    assert answers_around_a_signal(pair, "decode-0", ENGINE, signal.SIGSTOP) == expected[:4]
    assert answers_around_a_signal(pair, "prefill-0", SERVER, signal.SIGSTOP) == expected[:4]
    assert answers(pair) == expected


def answers_around_a_signal(server: Server, name: str, process: str, signum: int) -> list[list[int]]:
    """The beginnings of answers in whose middle a process of an instance gets a signal. The instance has come
    back then."""
    num_lives = server.num_lines(rf"\[{name}\] ready")
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(tokens_in_the_end, server, prompt, 300) for prompt in PROMPTS[:4]]
        eventually(
            lambda: metric(server, "mooncake_requests_by_state", state="decoding") > 0, "answers have begun"
        )
        os.kill(process_of(server.pid_of(name), process), signum)
        longer = [future.result(2 * START_S) for future in asked]
    server.wait_for_line(rf"\[{name}\] ready", num_lives + 1, START_S)
    return [answer[:NUM_TOKENS] for answer in longer]


def tokens_in_the_end(server: Server, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens of an answer to a client that asks again while no instance is there."""
    found: list[list[int]] = []

    def is_answered() -> bool:
        content = body(prompt, num_tokens, return_token_ids=True)
        answer = httpx.post(f"{server.url}/v1/completions", json=content, timeout=START_S)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            assert answer.status_code == httpx.codes.OK, answer.text
            found.append(answer.json()["choices"][0]["token_ids"])
        return bool(found)

    eventually(is_answered, "an instance is there", START_S)
    return found[0]


def process_of(worker: int, title: str) -> int:
    """The process of vLLM below a worker that is titled so."""
    below = [worker]
    for pid in below:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            below += map(int, children.read_text().split())
    [found] = [pid for pid in below if Path(f"/proc/{pid}/comm").read_text().startswith(title)]
    return found


def test_our_worker_prefills_and_vllm_decodes(
    tiny: Path, run_dir: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    ClusterKey.generate().save(tmp_path / "cluster.key")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    common = [
        *("--model", str(tiny), *SMALL, f"--security-key-file={tmp_path / 'cluster.key'}"),
        *(f"--conductor-endpoint={endpoint}", "--messenger-hosts=127.0.0.1", TRANSFERS),
    ]
    roles = {
        "conductor": [f"--conductor-reply-endpoint=tcp://127.0.0.1:{free_port()}"],
        "prefill": [],
        "decode": by_vllm(tmp_path),
    }
    servers = []
    try:
        for role, flags in roles.items():
            directory = run_dir / role
            directory.mkdir()
            servers.append(Server("--role", role, *common, *flags, run_dir=directory).start())
        for server in servers:
            server.wait_for_line("^ready in", deadline_s=START_S)
        conductor = servers[0]
        eventually(
            lambda: httpx.get(f"{conductor.url}/ready").status_code == 200, "both have joined", START_S
        )
        assert answers(conductor) == expected
        assert answers(conductor) == expected
    finally:
        for server in reversed(servers):
            server.stop()
