"""Starting and stopping."""

import asyncio
import itertools
import json
import socket
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from conductor.front.config import FrontConfig
from conductor.front.http.server import listen
from conductor.front.openai.model import load_served_model
from conductor.front.process import server
from mooncake.bus.in_process import Inbox, InProcessLink
from mooncake.errors import ConfigError
from mooncake.messages.requests import FinishReason, Request
from mooncake.model.checkpoint import open_checkpoint
from tests.conductor.front.fakes import (
    CLUSTER_KEY,
    DEADLINE_S,
    MODEL_NAME,
    FakeCluster,
    byte_model,
    raw_request,
    running_front,
)


def test_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        config = FrontConfig(
            port=port,
            reply_endpoint=f"ipc://{tmp_path}/reply",
            cluster_key=CLUSTER_KEY,
            served_model_name=MODEL_NAME,
        )
        with pytest.raises(ConfigError) as caught:
            asyncio.run(
                server.serve(config, byte_model(), InProcessLink(Inbox(), Inbox()), CollectorRegistry())
            )
    assert str(caught.value) == f"port {port} on 127.0.0.1 is in use; choose another with --port"


def test_unusable_host_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="address"):
        listen("203.0.113.1", 0)


def test_unknown_config_key_is_an_error() -> None:
    with pytest.raises(ValidationError, match="prot"):
        FrontConfig.model_validate({"prot": 1})


def test_stop_ends_running_requests_and_frees_the_port(tmp_path: Path) -> None:
    async def stall(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"a")

    with running_front(tmp_path, byte_model()) as front:
        front.cluster.behaviour = stall
        streamed, whole = (
            raw_request(
                front.address,
                "/v1/completions",
                json.dumps({"model": MODEL_NAME, "prompt": "x", "stream": stream}).encode(),
            )
            for stream in (True, False)
        )
        assert streamed.recv(100)
        unsent = socket.create_connection(front.address)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        )
        unsent.sendall(head)
        assert unsent.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # it waits for the body now
        front.cluster.wait_until(lambda: len(front.cluster.submitted) == 2)
    refused = b"HTTP/1.1 503"
    for connection, beginning, error in (
        (streamed, b"", b"data: {"),
        (whole, refused, b"{"),
        (unsent, refused, b"{"),
    ):
        with connection, connection.makefile("rb") as rest:
            answer = rest.read()
            assert answer.startswith(beginning)
            assert error + b'"error":{"message":"the server is shutting down"' in answer
    listen(*front.address).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(front.address)


def test_a_front_that_drains_finishes_its_answers_and_takes_no_new_requests(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    async def in_two_parts(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"a")
        await may_end.wait()
        await cluster.send_tokens(request, b"b", 1, FinishReason.LENGTH)

    with running_front(tmp_path, byte_model()) as front, httpx.Client(base_url=front.url) as client:
        front.cluster.behaviour = in_two_parts
        content = {"model": MODEL_NAME, "prompt": "x"}
        streamed, whole, leaving = (
            raw_request(front.address, "/v1/completions", json.dumps({**content, **fields}).encode())
            for fields in ({"stream": True}, {"n": 2}, {"stream": True})
        )
        with leaving:
            for connection in (streamed, leaving):
                assert connection.recv(100)
            front.cluster.wait_until(lambda: len(front.cluster.submitted) == 4)
            front.begin_to_drain()
            for path in (
                "/v1/completions",
                "/v1/chat/completions",
                "/tokenize",
                "/v1/context_caches",
                "/v1/context_caches/x",
            ):
                refused = client.post(path, json=content)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), path
                assert refused.headers["connection"] == "close"  # so that a client's pool connects elsewhere
                message = refused.json()["error"]["message"]
                assert message == "the server is shutting down and takes no new requests"
            assert client.get("/ready").status_code == 503
            for path in ("/health", "/live", "/metrics", "/v1/models"):
                assert client.get(path).status_code == 200, path
            assert not front.has_drained.is_set()
        front.cluster.loop.call_soon_threadsafe(may_end.set)
        for connection, end in ((streamed, b"data: [DONE]"), (whole, b'"index":1')):
            with connection, connection.makefile("rb") as rest:
                read = b""
                while end not in read:
                    read += rest.read1()
            assert b"error" not in read
        assert front.has_drained.wait(DEADLINE_S)
        counted = 'mooncake_requests_total{outcome="rejected"} 2.0'
        assert counted in client.get("/metrics").text


def test_a_front_without_open_requests_has_drained_at_once(tmp_path: Path) -> None:
    with running_front(tmp_path, byte_model()) as front, httpx.Client(base_url=front.url) as client:
        assert client.get("/ready").status_code == 200  # its connection stays open
        front.begin_to_drain()
        assert front.has_drained.is_set()


def test_who_takes_nothing_of_an_answer_is_cut_off(tmp_path: Path) -> None:
    async def without_end(cluster: FakeCluster, request: Request) -> None:
        for position in itertools.count(step=1000):
            await cluster.send_tokens(request, b"a" * 1000, position)
            await asyncio.sleep(0.001)  # for the others in this loop

    body = json.dumps({"model": MODEL_NAME, "prompt": "x", "stream": True}).encode()
    with running_front(tmp_path, byte_model(), send_buffer_bytes=4096, send_timeout_s=0.5) as front:
        front.cluster.behaviour = without_end
        with raw_request(front.address, "/v1/completions", body):
            front.cluster.wait_until(lambda: front.cluster.cancelled)


@pytest.mark.parametrize(
    "late", [b"POST /v1/comp", b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"]
)
def test_an_answer_is_not_cut_off_when_the_next_request_is_late(tmp_path: Path, late: bytes) -> None:
    may_end = asyncio.Event()

    async def in_two_parts(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"a")
        await may_end.wait()
        await cluster.send_tokens(request, b"b", 1, FinishReason.LENGTH)

    body = json.dumps({"model": MODEL_NAME, "prompt": "x", "stream": True}).encode()
    timeout_s = 2.0  # what is in time here must be so on a machine that stands still for a second
    with running_front(tmp_path, byte_model(), request_timeout_s=timeout_s) as front:
        front.cluster.behaviour = in_two_parts
        with raw_request(front.address, "/v1/completions", body) as connection:
            assert connection.recv(100)
            connection.sendall(late)
            with socket.create_connection(front.address, timeout=DEADLINE_S) as later:
                later.sendall(b"P")
                assert later.recv(100).startswith(b"HTTP/1.1 408")  # so the other one's time is over too
            front.cluster.loop.call_soon_threadsafe(may_end.set)
            with connection.makefile("rb") as rest:
                answer, _, after = rest.read().partition(b"data: [DONE]")
    assert b"HTTP" not in answer
    assert b"HTTP/1.1 408" in after


def test_default_model_speaks(tmp_path: Path) -> None:
    model = load_served_model(open_checkpoint(None), "bfloat16", block_size=16)
    text = "naïve 🎉 answer"

    async def speak(cluster: FakeCluster, request: Request) -> None:
        ids = [*model.tokenizer.encode(text, add_special_tokens=False), model.tokenizer.eos_token_ids[0]]
        for position, token_id in enumerate(ids):
            end = position == len(ids) - 1
            await cluster.send_tokens(request, [token_id], position, FinishReason.STOP if end else None)

    with running_front(tmp_path, model) as front:
        front.cluster.behaviour = speak
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
        answer = client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model=MODEL_NAME, prompt="word " * model.context_len)
