"""Conductors that die, while fronts and instances on nodes of their own live: no stream ends with them."""

import contextlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import (
    TRANSFERS,
    complete,
    is_ready,
    metric,
    streaming,
    wait_until_idle,
)
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
POOLS = ("--kvcache-block-size=8", "--kvcache-pool-bytes=128MiB", "--kvcache-device-bytes=128MiB")
NUM_PAGES = (128 << 20) // (8 * 4 * 1 * 2 * 16 * 4)
INSTANCES = ("p0", "d0", "d1")
MOST_TOKENS = 8000
"""More than are decoded in any of these tests."""
PROMPTS = [[3 + index, *range(10, 40 + 10 * index)] for index in range(4)]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The Conductor's node, which has a front of its own that nobody asks, and that of another front."""

    conductor: Server
    front: Server

    def kill_conductor(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.conductor.pid_of("conductor"), signum)

    @property
    def num_decoding(self) -> float:
        """The requests that are decoded as far as the Conductor knows; 0 without one."""
        try:
            return metric(self.conductor, "mooncake_requests_by_state", state="decoding")
        except httpx.TransportError:
            return 0

    def wait_until_idle(self) -> None:
        eventually(lambda: is_ready(self.conductor), "all instances are back")
        wait_until_idle(self.conductor, num_pages=NUM_PAGES, instances=INSTANCES)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("model")
    model = folder / "tiny"
    tiny_model("smollm2", model, max_position_embeddings=2 * MOST_TOKENS)
    write_tiny_tokenizer(model)
    ClusterKey.generate().save(folder / "key")
    shared = [f"--model={model}", *POOLS, TRANSFERS, f"--security-key-file={folder / 'key'}"]
    shared += [f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}"]
    shared += ["--conductor-reply-endpoint=tcp://127.0.0.1:*"]
    with contextlib.ExitStack() as stack:

        def node(role: str, *flags: str, until: str = "^ready in") -> Server:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
            return stack.enter_context(
                ForkedServer(f"--role={role}", *shared, *flags, run_dir=run_dir, until=until)
            )

        conductor, front = node("conductor"), node("front")
        for role, name in (("prefill", "p0"), ("decode", "d0"), ("decode", "d1")):
            node(role, f"--instance={name}")
        eventually(lambda: is_ready(front), "there is a pair")
        yield Nodes(conductor, front)


class Streams:
    """Clients that read long answers to all prompts, and hang up in the end. Use as a context manager."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_enough = threading.Event()
        self._num_events = [0] * len(PROMPTS)

    def __enter__(self) -> "Streams":
        """Return when each has its first tokens."""
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        self._clients = [self._threads.submit(self._read, index) for index in range(len(PROMPTS))]
        self.wait_for_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_enough.set()
        self._threads.shutdown()

    def _read(self, index: int) -> list[int]:
        token_ids: list[int] = []
        fields = {"prompt": PROMPTS[index], "num_tokens": MOST_TOKENS, "return_token_ids": True}
        with streaming(self._server, **fields) as events:
            for event in events:
                [choice] = json.loads(event)["choices"]
                token_ids += choice["token_ids"]
                self._num_events[index] += 1
                if self._is_enough.is_set():
                    return token_ids
        raise AssertionError("the answer has ended")

    def wait_for_more(self) -> None:
        """Wait until each has got further tokens."""
        before = list(self._num_events)

        def have_more() -> bool:
            for client in self._clients:
                if client.done():
                    client.result()
            return all(now > then for now, then in zip(self._num_events, before, strict=True))

        eventually(have_more, "each stream gets more tokens")

    def check(self) -> None:
        """Hang up, and compare with the answers of a quiet run of the same length."""
        self._is_enough.set()
        for prompt, client in zip(PROMPTS, self._clients, strict=True):
            token_ids = client.result()
            quiet = complete(self._server, prompt=prompt, num_tokens=len(token_ids), return_token_ids=True)
            assert token_ids == quiet["choices"][0]["token_ids"]


def test_streams_outlive_their_conductor(nodes: Nodes) -> None:
    with Streams(nodes.front) as streams:
        for _ in range(2):
            nodes.kill_conductor()
            eventually(lambda: nodes.num_decoding == len(PROMPTS), "another conductor has all of them")
            streams.wait_for_more()
        streams.check()
    nodes.wait_until_idle()
