"""Processes that are killed while modules leave, are away or come back: all but those of owner and helper.

Answers go on, or begin again with equal tokens; modules end up where `docs/migration.md` says; all pages are
free in the end.
"""

import contextlib
import dataclasses
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from mooncake.cli import operating
from mooncake.security.keys import ClusterKey
from tests.cluster.harness import Server, eventually
from tests.cluster.moving import Asked, Clients, come_back, modules_place, move
from tests.cluster.test_moved_modules import FLAGS, PAGE_BYTES, instance, migrate
from tests.cluster.tiny_cluster import (
    TRANSFERS,
    body,
    complete,
    is_ready,
    streaming,
    text_of,
    tiny_server,
    wait_until_idle,
)
from tests.deadline import DEADLINE_S
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
INSTANCES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
NUM_PAGES = 192
PROMPTS = [list(range(3 + index, 30 + 3 * index)) for index in range(5)]
NUM_TOKENS = 150
PARTS = ("--heads=1", "--layers=1:3", "--sequences=0.5")
WAYS = ("leaving", "away", "coming back")
TAKES_ALL_BACK = ("decode-0/messenger", "decode-1/messenger")
"""The processes with which a session of owner or helper ends."""
VICTIMS = ("conductor", "front", "prefill-0", "prefill-0/messenger", *TAKES_ALL_BACK)
QUICK = [
    ("conductor", "coming back", "--layers=1:3"),
    ("decode-0/messenger", "leaving", "--heads=1"),
    ("decode-1/messenger", "away", "--sequences=0.5"),
]
"""The cases that take no soak: each way and each part."""
_ALL = [(victim, way, part) for victim in VICTIMS for way in WAYS for part in PARTS]
CASES = [*QUICK, *random.Random(1).sample([one for one in _ALL if one not in QUICK], len(_ALL) - len(QUICK))]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Conductor, which has a front of its own, a front and three instances, each on a node of its own."""

    nodes: dict[str, Server]
    expected: list[str]

    @property
    def conductor(self) -> Server:
        return self.nodes["conductor"]

    def kill(self, name: str) -> None:
        """Kill a process, and wait until its supervisor has seen its end."""
        node = self.nodes[name.partition("/")[0]]
        died = rf"\[{name}\] died \(signal 9\)"
        num_deaths = node.num_lines(died)
        os.kill(node.pid_of(name), signal.SIGKILL)
        node.wait_for_line(died, num_deaths + 1)

    @contextlib.contextmanager
    def stopped_helper(self) -> Iterator[None]:
        """Make a context in which the helper's worker stands still, so that no move comes to its end."""
        pid = self.nodes["decode-1"].pid_of("decode-1")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def clients(self, server: Server, *, may_be_refused: bool) -> Clients:
        known = zip(PROMPTS, self.expected, strict=True)
        return Clients(
            server, [Asked(body(prompt, NUM_TOKENS), text, may_be_refused) for prompt, text in known]
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("wide")
    model, key = folder / "tiny", folder / "key"
    tiny_model("llama3", model, hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    write_tiny_tokenizer(model)
    ClusterKey.generate().save(key)
    shared = (
        *FLAGS,
        TRANSFERS,
        f"--kvcache-device-bytes={NUM_PAGES * PAGE_BYTES}",
        f"--security-key-file={key}",
        f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}",
        "--conductor-reply-endpoint=tcp://127.0.0.1:*",
        # The helper stands still while a busy machine starts another Conductor.
        "--conductor-peer-timeout-s=60",
        f"--hang-timeout-s={DEADLINE_S}",
        f"--conductor-placement-timeout-s={DEADLINE_S}",
    )
    with contextlib.ExitStack() as stack:
        nodes = dict[str, Server]()

        def start(name: str, role: str, *flags: str) -> None:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
            node = tiny_server(model, run_dir, f"--role={role}", *shared, *flags)
            nodes[name] = node.start()
            stack.callback(partial(Server.__exit__, node))

        start("conductor", "conductor")
        start("front", "front")
        for name, role in INSTANCES.items():
            start(name, role, f"--instance={name}")
        for name, node in nodes.items():
            node.wait_for_line(r"\] ready \w+ on" if name in INSTANCES else "^ready in")
        eventually(lambda: is_ready(nodes["front"]), "there are instances for both phases")
        expected = [text_of(complete(nodes["front"], prompt=one, num_tokens=NUM_TOKENS)) for one in PROMPTS]
        yield Cluster(nodes, expected)


@pytest.mark.parametrize(
    ("victim", "way", "part"),
    [
        pytest.param(*one, id=" ".join(one), marks=() if one in QUICK else (pytest.mark.soak,))
        for one in CASES
    ],
)
def test_a_killed_process_costs_no_answer_and_no_page(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, victim: str, way: str, part: str
) -> None:
    monkeypatch.setattr(operating, "MOST_MISSED_S", DEADLINE_S)  # a busy machine starts a Conductor late
    # Orders go through the front that may be killed; then clients ask the other one.
    orders = cluster.nodes["front"]
    asked = cluster.conductor if victim == "front" else orders
    is_back = way == "coming back" or victim in TAKES_ALL_BACK

    def is_at(helper: str) -> Callable[[], bool]:
        return lambda: modules_place(asked).get("helper") == helper

    def is_settled() -> bool:
        place = modules_place(asked)
        return place.get("helper") == ("" if is_back else "decode-1") and not place["is_moving"]

    def kill_in_the_middle(what: str) -> None:
        """Kill the victim between an order and its end, which the helper's standstill puts off."""
        with ThreadPoolExecutor(1) as thread:
            with cluster.stopped_helper():
                ordered = thread.submit(migrate, orders, "decode-0", "decode-1", what)
                eventually(lambda: modules_place(asked).get("is_moving") is True, "the order is given")
                eventually(is_at("decode-1"), "the owner carries it out")
                cluster.kill(victim)
                if victim == "decode-0/messenger":
                    eventually(is_at(""), "another session of the owner has begun")
                elif victim == "conductor":
                    eventually(is_at("decode-1"), "another Conductor knows where modules are")
                    assert way == "coming back" or modules_place(asked)["is_moving"]
            if not is_back:
                assert ordered.result() == 0

    with cluster.clients(asked, may_be_refused=victim == "conductor") as clients:
        if way != "leaving":
            move(asked, part)
        eventually(lambda: instance(asked, "decode-0")["num_requests"] > 0, "the owner has requests")
        if way == "away":
            cluster.kill(victim)
        else:
            kill_in_the_middle(part if way == "leaving" else "--back")
        clients.wait_for_more()
        if way != "coming back":
            eventually(is_settled, "modules are where they belong")
        come_back(asked)
        if victim == "conductor" and way == "coming back":
            move(asked, part)
            come_back(asked)
    wait_until_idle(cluster.conductor, num_pages=NUM_PAGES, instances=tuple(INSTANCES))


def test_streams_of_a_killed_front_end_and_leave_nothing_behind(cluster: Cluster) -> None:
    front = cluster.nodes["front"]
    move(front, "--layers=1:3")
    with streaming(front, prompt=PROMPTS[0], num_tokens=400) as events:
        next(events)
        cluster.kill("front")
        with pytest.raises(httpx.TransportError):
            list(events)
    eventually(lambda: is_ready(front), "another front answers")
    assert text_of(complete(front, prompt=PROMPTS[0], num_tokens=NUM_TOKENS)) == cluster.expected[0]
    assert modules_place(cluster.conductor)["helper"] == "decode-1"
    come_back(front)
    wait_until_idle(cluster.conductor, num_pages=NUM_PAGES, instances=tuple(INSTANCES))
