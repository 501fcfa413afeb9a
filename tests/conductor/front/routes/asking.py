"""Requests to a front, and answers of its fake cluster."""

import json
from typing import Any

import httpx
from openai.types.chat import ChatCompletionMessageParam

from mooncake.messages.requests import Request
from tests.conductor.front.fakes import DEADLINE_S, FakeCluster, Running

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
NUM_PROMPT_TOKENS = len(b"user: hi\nassistant: ")


def post(front: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(front.url + path, content=content, headers=headers, timeout=DEADLINE_S)


def says(text: str, *, end: bool = True, step: int = 1) -> Any:
    async def behaviour(cluster: FakeCluster, request: Request) -> None:
        await cluster.say(request, text, end=end, step=step)

    return behaviour
