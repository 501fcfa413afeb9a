"""Memory of requests: it is free once they have been answered, be it with an error."""

import gc
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from conductor.front.generation.generation import Generation
from conductor.front.openai.body import ReceivedBody
from mooncake.messages.requests import Request
from tests.conductor.front.fakes import MODEL_NAME, Behaviour, FakeCluster, Running
from tests.deadline import DEADLINE_S


@pytest.fixture(autouse=True, scope="module")
def _no_collector() -> Iterator[None]:
    """The collector is off: it would find cycles, but only after many more requests.

    What is there before these tests is put aside: `num_alive` looks at each object, again and again.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def num_alive(kind: type) -> int:
    return sum(type(one) is kind for one in gc.get_objects())


def assert_freed(kind: type) -> None:
    """Soon: the front may still be at the end of a response that the client has."""
    deadline_s = time.monotonic() + DEADLINE_S
    while num_alive(kind) and time.monotonic() < deadline_s:
        pass
    assert not num_alive(kind)


async def reject(cluster: FakeCluster, request: Request) -> None:
    await cluster.reject(request, 429, "too much", 1.0)


async def begin_and_fail(cluster: FakeCluster, request: Request) -> None:
    await cluster.send_tokens(request, list(b"Hel"))
    await cluster.fail(request, "it failed")


@pytest.mark.parametrize("size", [10, 20_000], ids=["short", "long"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/context_caches"])
def test_a_body_that_is_refused_is_freed(front: Running, path: str, size: int) -> None:
    body = json.dumps({"model": MODEL_NAME, "prompt": "x" * size, "nothing": 1})
    assert httpx.post(front.url + path, content=body).status_code == 400
    assert_freed(ReceivedBody)


def test_a_body_whose_client_hangs_up_is_freed(front: Running) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {front.address[0]}\r\nContent-Length: 50000\r\n\r\n"
    with socket.create_connection(front.address, timeout=DEADLINE_S) as client:
        client.sendall(head.encode() + b"x" * 20_000)
        while not num_alive(ReceivedBody):
            pass
    assert_freed(ReceivedBody)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behaviour", [reject, begin_and_fail])
def test_a_request_that_fails_is_freed(front: Running, behaviour: Behaviour, stream: bool) -> None:
    front.cluster.behaviour = behaviour
    body = {"model": MODEL_NAME, "prompt": "x" * 10, "stream": stream}
    assert "error" in httpx.post(f"{front.url}/v1/completions", json=body).text
    assert_freed(Generation)
    assert_freed(ReceivedBody)
