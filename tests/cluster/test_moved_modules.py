"""Modules that go to a helper and back while clients wait: `mooncake-serve migrate`."""

import contextlib
import math
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake.cli.commands import run
from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer, ServerOnOtherHost
from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.tiny_cluster import body, complete, is_ready, post, streaming, text_of, tiny_server
from tests.deadline import DEADLINE_S
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NUM_PAGES = 256
PAGE_BYTES = 8 * 4 * 4 * 2 * 64 * 4
"""8 tokens x 4 layers x 4 heads x (K, V) x 64 x 4 bytes."""
PROMPTS = [list(range(3 + index, 30 + 3 * index)) for index in range(6)]
NUM_TOKENS = 200


FLAGS = (
    f"--kvcache-device-bytes={NUM_PAGES * PAGE_BYTES}",
    "--worker-max-batch=3",  # so that both instances get requests
    "--conductor-rebalancing=false",
    "--conductor-migrate-for-slos=false",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 4 KV heads, which the CPU's own kernels compute."""
    folder = tmp_path_factory.mktemp("wide") / "tiny"
    tiny_model("llama3", folder, hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two decode instances on one host."""
    with tiny_server(model, tmp_path_factory.mktemp("run"), "--num-decode=2", *FLAGS) as running:
        yield running


@pytest.fixture
def nodes(model: Path, tmp_path: Path) -> Iterator[dict[str, Server]]:
    """A node with the Conductor, and one for each instance; decode-1 is on another host."""
    ClusterKey.generate().save(tmp_path / "key")
    shared = (f"--security-key-file={tmp_path / 'key'}", "--conductor-reply-endpoint=tcp://127.0.0.1:*")
    started: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:

        def start(
            name: str, *flags: str, until: str = r"\] ready \w+ on", kind: type[ForkedServer] = ForkedServer
        ) -> None:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
            each = (*FLAGS, *shared, *flags)
            started[name] = stack.enter_context(tiny_server(model, run_dir, *each, until=until, kind=kind))

        there = f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}"
        start("conductor", "--role=conductor", there, until="^ready in")
        start("prefill-0", "--role=prefill", "--instance=prefill-0", there)
        start("decode-0", "--role=decode", "--instance=decode-0", there)
        listening = "--worker-modules-listen=127.0.0.1:0"
        start("decode-1", "--role=decode", "--instance=decode-1", there, listening, kind=ServerOnOtherHost)
        yield started


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    return [text_of(complete(server, prompt=prompt, num_tokens=NUM_TOKENS)) for prompt in PROMPTS]


LONG, NUM_LONG = list(range(3, 303)), 180
"""A prompt of 38 pages, and the length of its answer, which needs 60 pages in the end."""


@pytest.fixture
def small_nodes(model: Path, tmp_path: Path) -> Iterator[dict[str, Server]]:
    """A node with the Conductor, and one for each instance, on one host; decode instances have few pages."""
    ClusterKey.generate().save(tmp_path / "key")
    shared = (f"--security-key-file={tmp_path / 'key'}", "--conductor-reply-endpoint=tcp://127.0.0.1:*")
    there = f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:

        def start(
            name: str, role: str, num_pages: int = NUM_PAGES, until: str = r"\] ready \w+ on"
        ) -> Server:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
            size = f"--kvcache-device-bytes={num_pages * PAGE_BYTES}"
            flags = (*FLAGS, *shared, there, f"--role={role}", size)
            named = () if role == "conductor" else (f"--instance={name}",)
            return stack.enter_context(tiny_server(model, run_dir, *flags, *named, until=until))

        yield {
            "conductor": start("conductor", "conductor", until="^ready in"),
            "prefill-0": start("prefill-0", "prefill"),
            "decode-0": start("decode-0", "decode", 32),
            "decode-1": start("decode-1", "decode", 48),
        }


class Clients:
    """One for each prompt, several times."""

    def __init__(self, server: Server, expected: list[str]) -> None:
        self._server, self._expected = server, expected
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        self._answers: list[Future[httpx.Response]] = []

    def ask(self) -> None:
        """Ask for all prompts, again if need be, until some are seen at the instance whose modules move."""

        def are_seen() -> bool:
            if all(answer.done() for answer in self._answers):
                asked = [body(prompt, num_tokens=NUM_TOKENS) for prompt in PROMPTS]
                self._answers += [self._threads.submit(post, self._server, one) for one in asked]
            return instance(self._server, "decode-0")["num_requests"] > 0

        eventually(are_seen, "requests are there")

    def check(self) -> None:
        """All have got the right answer."""
        texts = []
        for answer in self._answers:
            assert answer.result().status_code == 200, answer.result().text
            texts.append(text_of(answer.result().json()))
        assert texts == self._expected * (len(texts) // len(self._expected))


@pytest.fixture
def clients(server: Server, expected: list[str]) -> Clients:
    return Clients(server, expected)


def instance(server: Server, name: str) -> dict[str, Any]:
    """As operators see it; nothing but an absurd number of pages where it is not registered."""
    listed = HTTP.get(f"{server.url}/admin/instances", timeout=DEADLINE_S).json()["instances"]
    absent: dict[str, Any] = {"num_device_pages": -1, "num_requests": 0}
    return next((one for one in listed if one["name"] == name), absent)


def migrate(server: Server, *arguments: str) -> int:
    return run(["migrate", *arguments, "--url", server.url])


def wait_for_pages(server: Server, owner: int, helper: int) -> None:
    def has_them() -> bool:
        return (
            instance(server, "decode-0")["num_device_pages"] == owner
            and instance(server, "decode-1")["num_device_pages"] == helper
        )

    eventually(has_them, f"there are {owner} and {helper} pages")


def test_answers_go_on_while_modules_leave_and_come_back(
    server: Server, clients: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    clients.ask()
    assert migrate(server, "decode-0", "decode-1", "--heads=1") == 0
    assert capsys.readouterr().out.endswith(
        "1 of the KV heads of decode-0 is at decode-1; decode-0 has 341 pages\n"
    )
    wait_for_pages(server, 341, 170)
    clients.ask()
    assert migrate(server, "decode-0", "decode-1", "--back") == 0
    assert capsys.readouterr().out.endswith("all modules of decode-0 are there; decode-0 has 256 pages\n")
    wait_for_pages(server, NUM_PAGES, NUM_PAGES)
    clients.check()


def test_answers_go_on_while_layers_leave_and_come_back(
    server: Server, clients: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    clients.ask()
    assert migrate(server, "decode-0", "decode-1", "--layers=3:4") == 0
    told = capsys.readouterr().out
    found = re.search(r"layers 3:4 of decode-0 are at decode-1; decode-0 has (\d+) pages\n$", told)
    assert found is not None
    num_pages = int(found[1])
    # A third more than before, and some in the memory of the weights, packed by instruction set.
    assert 341 + 19 <= num_pages <= 341 + 20
    wait_for_pages(server, num_pages, NUM_PAGES - math.ceil(num_pages / 4))
    clients.ask()
    assert migrate(server, "decode-0", "decode-1", "--back") == 0
    wait_for_pages(server, NUM_PAGES, NUM_PAGES)
    clients.check()


@pytest.mark.parametrize(
    ("killed", "part", "what"),
    [
        pytest.param("decode-1", "--heads=2", "2 of the KV heads", marks=pytest.mark.soak),
        ("decode-1", "--layers=1:3", "layers 1:3"),
        ("decode-0", "--heads=2", ""),
        pytest.param("decode-0", "--layers=0:2", "", marks=pytest.mark.soak),
    ],
    ids=["helper of heads", "helper of layers", "owner of heads", "owner of layers"],
)
def test_a_killed_process_costs_no_answer_and_leaves_nothing_behind(
    server: Server, clients: Clients, killed: str, part: str, what: str
) -> None:
    assert migrate(server, "decode-0", "decode-1", part) == 0
    clients.ask()
    os.kill(server.pid_of(killed), signal.SIGKILL)
    clients.check()
    wait_for_pages(server, NUM_PAGES, NUM_PAGES)
    if killed == "decode-1":
        place = instance(server, "decode-0")["modules"]
        assert (place["helper"], place["error"]) == ("", f"decode-1 is lost, and {what} are here again")
    eventually(lambda: is_ready(server), "all instances serve again")


@pytest.mark.parametrize("part", ["--heads=2", "--layers=1:3", "--sequences=0.5"])
def test_a_prefill_instance_is_a_helper_beside_its_prompts(
    server: Server, clients: Clients, part: str
) -> None:
    def moves() -> bool:
        return migrate(server, "decode-0", "prefill-0", part) == 0

    eventually(moves, "the prefill instance has registered again after an earlier test")
    assert instance(server, "decode-0")["modules"]["helper"] == "prefill-0"
    clients.ask()
    assert migrate(server, "decode-0", "prefill-0", "--back") == 0
    wait_for_pages(server, NUM_PAGES, NUM_PAGES)
    assert moves()
    clients.ask()
    os.kill(server.pid_of("prefill-0"), signal.SIGKILL)
    clients.check()
    wait_for_pages(server, NUM_PAGES, NUM_PAGES)
    eventually(lambda: is_ready(server), "all instances serve again")
    lost = "prefill-0 is lost"
    eventually(lambda: instance(server, "decode-0")["modules"]["error"].startswith(lost), lost)


@pytest.mark.soak
@pytest.mark.parametrize("part", ["--heads=2", "--layers=1:3"])
def test_a_helper_that_stands_still_for_a_while_costs_no_answer(
    server: Server, clients: Clients, part: str
) -> None:
    assert migrate(server, "decode-0", "decode-1", part) == 0
    clients.ask()
    stopped = server.pid_of("decode-1")
    os.kill(stopped, signal.SIGSTOP)
    try:
        eventually(lambda: instance(server, "decode-0")["modules"]["helper"] == "", "all is back")
    finally:
        os.kill(stopped, signal.SIGCONT)
    clients.check()
    wait_for_pages(server, NUM_PAGES, NUM_PAGES)
    eventually(lambda: is_ready(server), "all instances serve again")


def test_a_helper_that_drains_gives_the_modules_back(server: Server, clients: Clients) -> None:
    assert migrate(server, "decode-0", "decode-1", "--heads=1") == 0
    clients.ask()
    drained = HTTP.post(f"{server.url}/admin/instances/decode-1/drain?stay=true", timeout=DEADLINE_S)
    assert drained.status_code == 200, drained.text
    wait_for_pages(server, NUM_PAGES, NUM_PAGES)
    assert instance(server, "decode-0")["modules"]["error"] == ""
    HTTP.post(f"{server.url}/admin/instances/decode-1/serve", timeout=DEADLINE_S).raise_for_status()
    clients.check()


def test_orders_that_cannot_be_carried_out_are_refused_by_name(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert migrate(server, *arguments) == 1
        return capsys.readouterr().err

    assert "no instance 'nobody' is registered" in refusal("decode-0", "nobody", "--heads=1")
    assert "the model has 4 KV heads" in refusal("decode-0", "decode-1", "--heads=4")
    assert "the model has layers 0:4" in refusal("decode-0", "decode-1", "--layers=3:5")
    assert "nothing of decode-0 is at decode-1" in refusal("decode-0", "decode-1", "--back")
    assert migrate(server, "decode-0", "decode-1", "--heads=1") == 0
    assert "take them back first" in refusal("decode-0", "decode-1", "--heads=2")
    role = HTTP.post(f"{server.url}/admin/instances/decode-1/role?role=prefill", timeout=DEADLINE_S)
    assert role.json()["error"]["message"] == "decode-1 has modules of decode-0"
    assert migrate(server, "decode-0", "decode-1", "--back") == 0


@pytest.mark.parametrize(
    ("family", "flag", "reason"),
    [
        ("", "--dtype=float16", "torch computes this model: torch.float16 is not one of torch.bfloat16,"),
        ("opt", "--dtype=float32", "torch computes this model: the project's kernels have no LayerNorms,"),
        ("", "--worker-tensor-parallel=2", "its heads are divided among the 2 ranks of a tensor-parallel"),
    ],
    ids=["float16", "opt", "tensor parallel"],
)
def test_an_order_is_refused_with_the_model_or_dtype_that_has_no_support(
    model: Path,
    tmp_path: Path,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    flag: str,
    reason: str,
) -> None:
    if family:
        model = tmp_path / "tiny"
        tiny_model(family, model)
        write_tiny_tokenizer(model)
    with tiny_server(model, run_dir, flag) as server:
        assert migrate(server, "decode-0", "prefill-0", "--heads=1") == 1
    told = capsys.readouterr().err
    assert "KV heads neither leave nor come to decode-0: " in told
    assert reason in told


def test_modules_go_to_another_host_and_back_and_the_loss_of_the_host_costs_no_answer(
    nodes: dict[str, Server], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    conductor = nodes["conductor"]
    clients = Clients(conductor, expected)
    assert migrate(conductor, "decode-1", "decode-0", "--heads=1") == 1
    assert "are on different hosts, and decode-0 hosts KV heads of its own host" in capsys.readouterr().err
    # A third more than before. Layers leave some memory of the weights too, packed by instruction set.
    for part, numbers in (("--heads=1", {341}), ("--layers=3:4", {341 + 19, 341 + 20})):
        clients.ask()
        assert migrate(conductor, "decode-0", "decode-1", part) == 0
        assert instance(conductor, "decode-0")["num_device_pages"] in numbers
        clients.ask()
        assert migrate(conductor, "decode-0", "decode-1", "--back") == 0
        wait_for_pages(conductor, NUM_PAGES, NUM_PAGES)
    clients.check()
    assert migrate(conductor, "decode-0", "decode-1", "--layers=1:3") == 0
    clients.ask()
    os.kill(nodes["decode-1"].pid_of("decode-1"), signal.SIGKILL)
    clients.check()
    wait_for_pages(conductor, NUM_PAGES, NUM_PAGES)
    assert instance(conductor, "decode-0")["modules"]["helper"] == ""


def test_a_request_is_longer_than_fits_into_its_instance_while_a_helper_has_its_first_pages(
    small_nodes: dict[str, Server], server: Server, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected_long = text_of(complete(server, prompt=LONG, num_tokens=NUM_LONG))
    conductor, long = small_nodes["conductor"], body(LONG, num_tokens=NUM_LONG)
    assert post(conductor, long).status_code == 400
    assert migrate(conductor, "decode-0", "decode-1", "--sequences=0.5") == 0
    told = capsys.readouterr().out
    assert told.endswith("the first 50% of sequences of decode-0 are at decode-1; decode-0 has 64 pages\n")
    assert instance(conductor, "decode-0")["modules"]["part"]["share"] == 0.5
    eventually(lambda: post(conductor, long).status_code == 200, "the front knows of the pages")
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(post, conductor, long) for _ in range(2)]
        short = threads.submit(post, conductor, body(PROMPTS[0], num_tokens=NUM_TOKENS))
        for answer in answers:
            assert text_of(answer.result().json()) == expected_long
        assert text_of(short.result().json()) == expected[0]
    assert migrate(conductor, "decode-0", "decode-1", "--back") == 0
    wait_for_pages(conductor, 32, 48)


@pytest.mark.parametrize("killed", ["decode-0", "decode-1"], ids=["owner", "helper"])
def test_a_killed_process_ends_a_request_that_fits_nowhere_then_and_costs_no_other_answer(
    small_nodes: dict[str, Server], expected: list[str], killed: str
) -> None:
    conductor, long = small_nodes["conductor"], body(LONG, num_tokens=NUM_LONG)
    assert migrate(conductor, "decode-0", "decode-1", "--sequences=0.5") == 0
    eventually(lambda: post(conductor, long).status_code == 200, "the front knows of the pages")
    with streaming(conductor, prompt=LONG, num_tokens=NUM_LONG) as events, ThreadPoolExecutor(2) as threads:
        short = [threads.submit(post, conductor, body(one, num_tokens=NUM_TOKENS)) for one in PROMPTS[:2]]
        next(events)  # with the first token: the prompt's KVCache has come
        os.kill(small_nodes[killed].pid_of(killed), signal.SIGKILL)
        assert any("decode instance holds at most" in event for event in events)
        assert [text_of(one.result().json()) for one in short] == expected[:2]
    wait_for_pages(conductor, 32, 48)
    assert post(conductor, long).status_code == 400


@pytest.mark.parametrize("part", ["--heads=2", "--sequences=0.5"])
def test_another_conductor_knows_how_many_pages_are_the_owners_own(
    small_nodes: dict[str, Server], part: str
) -> None:
    """While KV heads are elsewhere, no request is longer than fits without a helper."""
    conductor, long = small_nodes["conductor"], body(LONG, num_tokens=NUM_LONG)
    assert migrate(conductor, "decode-0", "decode-1", part) == 0
    os.kill(conductor.pid_of("conductor"), signal.SIGKILL)

    def is_known() -> bool:
        with contextlib.suppress(httpx.TransportError):
            names = ("decode-0", "decode-1", "prefill-0")
            pages = [instance(conductor, name)["num_device_pages"] for name in names]
            return is_ready(conductor) and pages == [64, 16, NUM_PAGES]
        return False

    eventually(is_known, "all instances are known again, with the modules where they are")
    assert post(conductor, long).status_code == (200 if part == "--sequences=0.5" else 400)
    assert migrate(conductor, "decode-0", "decode-1", "--back") == 0
