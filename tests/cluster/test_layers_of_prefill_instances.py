"""Layers of a prefill instance that go to a decode instance and back while clients wait."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.test_moved_modules import NUM_PAGES, PAGE_BYTES, instance, migrate
from tests.cluster.tiny_cluster import (
    TRANSFERS,
    body,
    cached_tokens,
    complete,
    is_ready,
    post,
    text_of,
    tiny_server,
)
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
PROMPTS = [[3 + (7 * index + token) % 200 for token in range(40 + 50 * index)] for index in range(6)]
NUM_TOKENS = 20
FLAGS = (
    "--num-decode=1",
    f"--kvcache-device-bytes={NUM_PAGES * PAGE_BYTES}",
    "--kvcache-pool-bytes=64MiB",
    "--worker-max-batch=3",
    "--conductor-rebalancing=false",
    TRANSFERS,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A prefill and a decode instance of a model that the CPU's own kernels compute."""
    model = tmp_path_factory.mktemp("wide") / "tiny"
    tiny_model("llama3", model, hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    write_tiny_tokenizer(model)
    with tiny_server(model, tmp_path_factory.mktemp("run"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    return [text_of(complete(server, prompt=prompt, num_tokens=NUM_TOKENS)) for prompt in PROMPTS]


class Clients:
    """Clients that ask for all prompts at once. No prompt shares blocks with an earlier one."""

    def __init__(self, server: Server, expected: list[str]) -> None:
        self._server, self._expected = server, expected
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        self._answers: list[Future[httpx.Response]] = []

    def ask(self, salt: str) -> None:
        """Ask for all prompts."""
        asked = [body(prompt, num_tokens=NUM_TOKENS, cache_salt=salt) for prompt in PROMPTS]
        self._answers += [self._threads.submit(post, self._server, one) for one in asked]

    def check(self) -> None:
        """Wait for all answers. Each must be right."""
        texts = []
        for answer in self._answers:
            assert answer.result().status_code == 200, answer.result().text
            texts.append(text_of(answer.result().json()))
        assert texts == self._expected * (len(texts) // len(self._expected))


@pytest.fixture
def clients(server: Server, expected: list[str]) -> Clients:
    return Clients(server, expected)


def move(server: Server, layers: str) -> None:
    """Move layers to the decode instance, which has room for them once its own requests need less."""
    eventually(
        lambda: migrate(server, "prefill-0", "decode-0", f"--layers={layers}") == 0, f"{layers} are away"
    )


def wait_for_pages(server: Server, num: int) -> None:
    eventually(lambda: instance(server, "prefill-0")["num_device_pages"] == num, f"prefill-0 has {num} pages")


def test_answers_go_on_while_layers_leave_and_come_back(
    server: Server, clients: Clients, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    clients.ask("leave")
    move(server, "1:3")
    assert "layers 1:3 of prefill-0 are at decode-0; prefill-0 has " in capsys.readouterr().out
    assert instance(server, "prefill-0")["num_device_pages"] > NUM_PAGES
    clients.ask("away")
    clients.check()
    again = complete(server, prompt=PROMPTS[3], num_tokens=NUM_TOKENS, cache_salt="away")
    assert text_of(again) == expected[3]
    assert cached_tokens(again) >= len(PROMPTS[3]) - 8
    clients.ask("come back")
    assert migrate(server, "prefill-0", "decode-0", "--back") == 0
    wait_for_pages(server, NUM_PAGES)
    clients.ask("back")
    clients.check()
    later = complete(server, prompt=PROMPTS[2], num_tokens=NUM_TOKENS, cache_salt="away")
    assert text_of(later) == expected[2]
    assert cached_tokens(later) >= len(PROMPTS[2]) - 8


@pytest.mark.parametrize("killed", ["decode-0", "prefill-0"])
def test_a_killed_process_costs_no_answer_and_leaves_nothing_behind(
    server: Server, clients: Clients, killed: str
) -> None:
    move(server, "1:3")
    clients.ask(f"{killed} is killed")
    os.kill(server.pid_of(killed), signal.SIGKILL)
    clients.check()
    wait_for_pages(server, NUM_PAGES)
    eventually(lambda: is_ready(server), "all instances serve again")
    assert instance(server, "prefill-0")["modules"]["helper"] == ""


def test_the_owner_keeps_its_role_and_gets_its_layers_back_when_the_helper_drains(
    server: Server, clients: Clients
) -> None:
    move(server, "0:2")
    role = HTTP.post(
        f"{server.url}/admin/instances/prefill-0/role?role=decode&force=true", timeout=DEADLINE_S
    )
    assert role.json()["error"]["message"] == "layers 0:2 of prefill-0 are at decode-0"
    path = f"{server.url}/admin/instances/decode-0"
    HTTP.post(f"{path}/drain?stay=true&force=true", timeout=DEADLINE_S).raise_for_status()
    wait_for_pages(server, NUM_PAGES)
    HTTP.post(f"{path}/serve", timeout=DEADLINE_S).raise_for_status()
    eventually(lambda: is_ready(server), "the helper serves again")
    clients.ask("drained")
    clients.check()


def test_heads_and_sequences_stay(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for part, what in (("--heads=1", "KV heads"), ("--sequences=0.5", "pages of sequences")):
        assert migrate(server, "prefill-0", "decode-0", part) == 1
        reason = f"prefill-0 prefills, so that layers of it can be at a helper, and no {what}"
        assert reason in capsys.readouterr().err
