"""Clients that ask a cluster for the same answers again and again, while its nodes are replaced."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.cluster.harness import eventually
from tests.cluster.tiny_cluster import body, post, streaming, text_in, text_of
from tests.cluster.upgrades.cluster import Cluster

NUM_TOKENS = 40
PROMPTS = [[3 + index, *range(10, 80 + 10 * index)] for index in range(4)]
DRAWN = {"temperature": 0.8, "top_k": 20, "seed": 5}


class Clients:
    """One client for each prompt. Use as a context manager; at its end all answers must have been right."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_enough = threading.Event()
        self._num_answers = [0] * len(PROMPTS)

    def __enter__(self) -> "Clients":
        """Get each client's answer once, from an undisturbed cluster, and start the clients."""
        self._expected = [self._ask(index, None) for index in range(len(PROMPTS))]
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        self._clients = [self._threads.submit(self._keep_asking, index) for index in range(len(PROMPTS))]
        return self

    def __exit__(self, *_: object) -> None:
        self._is_enough.set()
        self._threads.shutdown()
        for client in self._clients:
            client.result()

    def _ask(self, index: int, salt: str | None) -> str:
        """Return the text of one answer. With a new `salt` no block of the prompt is cached."""
        fields: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        if index % 2:
            fields |= DRAWN
        with self._cluster.asked() as front:
            if index < 2:
                answer = post(front, body(PROMPTS[index], NUM_TOKENS, **fields))
                assert answer.status_code == 200, answer.text
                return text_of(answer.json())
            with streaming(front, prompt=PROMPTS[index], num_tokens=NUM_TOKENS, **fields) as events:
                return "".join(map(text_in, events))

    def _keep_asking(self, index: int) -> None:
        rng = random.Random(index)
        while not self._is_enough.is_set():
            salt = f"{rng.random()}" if rng.random() < 0.5 else None
            assert self._ask(index, salt) == self._expected[index]
            self._num_answers[index] += 1

    def wait_for_more(self) -> None:
        """Wait until each client has two more answers. The first may be to a request that was sent before."""
        goals = [num + 2 for num in self._num_answers]
        self.wait_until(
            lambda: all(now >= goal for now, goal in zip(self._num_answers, goals, strict=True)),
            "each client gets more answers",
        )

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` is true. Raises the error of a client that has failed."""

        def is_met() -> bool:
            for client in self._clients:
                if client.done():
                    client.result()
            return condition()

        eventually(is_met, what)
