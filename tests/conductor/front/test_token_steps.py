"""The streams of one step: each gets all of its own, in order, whatever others do."""

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake.messages.fronts import TokenOutput
from mooncake.messages.requests import FinishReason, Ref, Request
from tests.conductor.front.fakes import (
    DEADLINE_S,
    MODEL_NAME,
    FakeCluster,
    Running,
    byte_model,
    raw_request,
    running_front,
)


class Steps:
    """A cluster that sends what a test says, a step at a time."""

    def __init__(self, front: Running) -> None:
        self._front = front
        self.cluster = front.cluster
        self.cluster.behaviour = self._only_note

    async def _only_note(self, cluster: FakeCluster, request: Request) -> None:
        pass

    def ask(self, prompt: str, **fields: Any) -> tuple[socket.socket, list[Request]]:
        """A client that wants a stream, and what reaches the cluster."""
        num_before = len(self.cluster.submitted)
        body = {"model": MODEL_NAME, "prompt": prompt, "stream": True, **fields}
        connection = raw_request(self._front.address, "/v1/completions", json.dumps(body).encode())
        self.cluster.wait_until(lambda: len(self.cluster.submitted) == num_before + fields.get("n", 1))
        return connection, self.cluster.submitted[num_before:]

    def send(self, steps: Sequence[list[TokenOutput]]) -> None:
        """Each as one message."""
        asyncio.run_coroutine_threadsafe(self._send(steps), self.cluster.loop).result(DEADLINE_S)

    async def _send(self, steps: Sequence[list[TokenOutput]]) -> None:
        for outputs in steps:
            await self.cluster.send_step(self.cluster.submitted[0].reply_to, outputs)
            await asyncio.sleep(0)  # the front is in this loop


@pytest.fixture
def steps(front: Running) -> Steps:
    return Steps(front)


def output(request: Request, text: bytes, position: int = 0, *, is_last: bool = False) -> TokenOutput:
    finish_reason = FinishReason.LENGTH if is_last else None
    return TokenOutput(Ref(1, request.request_id, 1), position, list(text), 0, finish_reason)


def token_by_token(texts: Sequence[tuple[Request, bytes]]) -> list[list[TokenOutput]]:
    """Steps in which each request gets one more byte; all texts are as long."""
    [length] = {len(text) for _, text in texts}
    return [
        [
            output(request, text[position : position + 1], position, is_last=position + 1 == length)
            for request, text in texts
        ]
        for position in range(length)
    ]


def events_of(connection: socket.socket) -> list[Any]:
    """Of the answer that comes next, to its end."""
    answer = b""
    with connection:
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            received = connection.recv(1 << 16)
            assert received, "the answer is not whole"
            answer += received
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    body = b""
    while rest != b"0\r\n\r\n":
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    *events, nothing = body.decode().split("\n\n")
    assert nothing == ""
    return [
        event if event == "data: [DONE]" else json.loads(event.removeprefix("data: ")) for event in events
    ]


def choice_of(events: list[Any], index: int = 0) -> tuple[str, str]:
    """Text and why it ended, of an answer that is whole."""
    assert events[-1] == "data: [DONE]"
    choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def test_choices_and_streams_of_one_step_are_whole_and_in_order(steps: Steps) -> None:
    two, [of_one_choice, of_another] = steps.ask("two", n=2, stop=".")
    one, [of_one] = steps.ask("one")
    steps.send(token_by_token([(of_one_choice, b"x.yzw"), (of_one, b"12345"), (of_another, b"vwxyz")]))
    answer = events_of(two)
    assert [choice_of(answer, index) for index in (0, 1)] == [("x", "stop"), ("vwxyz", "length")]
    assert choice_of(events_of(one)) == ("12345", "length")


def test_an_error_of_one_stream_leaves_the_others_of_its_step_alone(steps: Steps) -> None:
    connections, requests = zip(*(steps.ask(prompt) for prompt in "abc"), strict=True)
    first, failing, last = (request for [request] in requests)
    steps.send(
        [
            [output(request, b"1") for request in (first, failing, last)],
            [
                output(first, b"2", 1, is_last=True),
                output(failing, b"3", 0),
                output(last, b"2", 1, is_last=True),
            ],
        ]
    )
    for connection in (connections[0], connections[2]):
        assert choice_of(events_of(connection)) == ("12", "length")
    *texts, error = events_of(connections[1])
    assert [text["choices"][0]["text"] for text in texts] == ["1"]
    assert "drew other tokens" in error["error"]["message"]


def test_a_client_that_has_gone_when_its_step_is_written_costs_the_others_nothing(
    front: Running, steps: Steps
) -> None:
    gone, [of_gone] = steps.ask("gone")
    there, [of_there] = steps.ask("there")
    steps.send([[output(of_gone, b"1"), output(of_there, b"1")]])
    with gone:
        assert gone.recv(100).startswith(b"HTTP/1.1 200")
        gone.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        httpx.get(f"{front.url}/health", timeout=DEADLINE_S)  # answered later, so that has been read
        # So that the server's next write fails: with a request waiting it reads no more, and sees no end.
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    steps.send([[output(of_gone, b"2", 1), output(of_there, b"2", 1, is_last=True)]])
    assert choice_of(events_of(there)) == ("12", "length")
    front.cluster.wait_until(lambda: of_gone.request_id in front.cluster.cancelled)


def test_a_client_that_does_not_read_gets_its_part_later_and_the_others_at_once(tmp_path: Path) -> None:
    num_steps, num_each = 400, 2000
    letters = [b"%c" % (97 + position % 26) for position in range(num_steps)]
    with running_front(tmp_path, byte_model(), send_buffer_bytes=4096) as front:
        steps = Steps(front)
        slow, [of_slow] = steps.ask("slow")
        quick, [of_quick] = steps.ask("quick")
        steps.send(
            [
                [
                    output(
                        of_slow, letter * num_each, num_each * position, is_last=position + 1 == num_steps
                    ),
                    output(of_quick, letter, position, is_last=position + 1 == num_steps),
                ]
                for position, letter in enumerate(letters)
            ]
        )
        assert choice_of(events_of(quick)) == (b"".join(letters).decode(), "length")
        text = b"".join(letter * num_each for letter in letters).decode()
        assert choice_of(events_of(slow)) == (text, "length")
