"""Clients that read long answers of a tiny model while something happens to its cluster."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import complete, streaming

MOST_TOKENS = 8000
"""More than are decoded in any of these tests."""
PROMPTS = [[3 + index, *range(10, 40 + 10 * index)] for index in range(4)]


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
