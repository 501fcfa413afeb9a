"""Clients that ask for the same answers all the time, and modules of decode-0 that move to decode-1 and back.

Owns: these clients and orders. Does not know: how the cluster is made, what happens to it meanwhile.
"""

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.test_moved_modules import migrate
from tests.cluster.tiny_cluster import post, text_of
from tests.deadline import DEADLINE_S

_PAUSE_S = 0.2
"""Seconds of a client's pause after an answer, so that other tests have a core."""


class Asked(NamedTuple):
    """A request, and the text of its answer."""

    content: dict[str, object]
    expected: str
    may_be_refused: bool = False
    """Whether the answer may be a refusal: status 400 or 503."""


class Clients:
    """Clients that ask again and again, one for each request, and check each answer.

    Use as a context manager.
    """

    def __init__(self, server: Server, requests: Sequence[Asked]) -> None:
        self._server, self._requests, self._over = server, requests, threading.Event()
        self.num_answers = 0

    def __enter__(self) -> "Clients":
        self._threads = ThreadPoolExecutor(len(self._requests))
        self._clients = [self._threads.submit(self._ask, asked) for asked in self._requests]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown()
        for client in self._clients:
            client.result()

    def _ask(self, asked: Asked) -> None:
        while not self._over.is_set():
            answer = post(self._server, asked.content)
            if not (asked.may_be_refused and answer.status_code in (400, 503)):
                assert answer.status_code == 200, answer.text
                assert text_of(answer.json()) == asked.expected
                self.num_answers += 1
            self._over.wait(_PAUSE_S)

    def go_on_for(self, seconds: float) -> None:
        """Let the clients go on for a while."""
        self._over.wait(seconds)

    def wait_for_more(self) -> None:
        """Wait for further answers, as many as there are clients."""
        least = self.num_answers + len(self._clients)

        def are_there() -> bool:
            for client in self._clients:
                if client.done():
                    client.result()
            return self.num_answers >= least

        eventually(are_there, "there are further answers")


def modules_place(server: Server) -> dict[str, Any]:
    """Return where the owner's modules are; nothing while it is not registered, or no Conductor is there."""
    with contextlib.suppress(httpx.TransportError):
        answer = HTTP.get(f"{server.url}/admin/instances", timeout=DEADLINE_S)
        listed = answer.json()["instances"] if answer.status_code == 200 else []
        return next((one["modules"] for one in listed if one["name"] == "decode-0"), {})
    return {}


def order_back(server: Server) -> None:
    """Order the owner's modules back, without a wait. The order may be refused."""
    HTTP.post(f"{server.url}/admin/instances/decode-0/back?from=decode-1", timeout=DEADLINE_S)


def move(server: Server, part: str) -> None:
    """Move a part to the helper, and wait until it is there. It has room once its own requests have ended."""
    eventually(lambda: migrate(server, "decode-0", "decode-1", part) == 0, f"{part} is away")


def come_back(server: Server) -> None:
    """Order all modules back unless they are. An owner of which the Conductor has not noticed yet that it is
    lost carries out no order."""

    def are_back() -> bool:
        if modules_place(server).get("helper"):
            migrate(server, "decode-0", "decode-1", "--back")
        found = modules_place(server)
        return found.get("helper") == "" and not found["is_moving"]

    eventually(are_back, "all modules are at the owner")
