"""Clients that read long answers of a tiny model while something happens to its cluster."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import complete, streaming

MOST_TOKENS = 8000
"""More tokens than any of these tests waits for."""
PROMPTS = [[3 + index, *range(10, 40 + 10 * index)] for index in range(4)]


class Streams:
    """Clients that read long answers to all prompts, and hang up in the end. Use as a context manager."""

    _quiet: ClassVar[list[list[int]]] = [[] for _ in PROMPTS]
    """The beginnings of the answers of an undisturbed cluster. All clusters have the same model."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_enough = threading.Event()
        self._num_events = [0] * len(PROMPTS)

    def __enter__(self) -> "Streams":
        """Start all clients, and return when each has its first tokens."""
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
        """Wait until each client has got further tokens."""
        before = list(self._num_events)

        def have_more() -> bool:
            for client in self._clients:
                if client.done():
                    client.result()
            return all(now > then for now, then in zip(self._num_events, before, strict=True))

        eventually(have_more, "each stream gets more tokens")

    def check(self) -> None:
        """Hang up, and compare the answers with those of an undisturbed cluster."""
        self._is_enough.set()
        read = [client.result() for client in self._clients]
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            list(threads.map(self._learn, range(len(PROMPTS)), map(len, read)))
        for token_ids, quiet in zip(read, self._quiet, strict=True):
            assert token_ids == quiet[: len(token_ids)]

    def _learn(self, index: int, num_tokens: int) -> None:
        """Get the undisturbed answer again if the known one has fewer than `num_tokens` tokens.

        This takes as long as all streams took together.
        """
        if num_tokens > len(self._quiet[index]):
            prompt = PROMPTS[index]
            quiet = complete(self._server, prompt=prompt, num_tokens=num_tokens, return_token_ids=True)
            self._quiet[index] = quiet["choices"][0]["token_ids"]
