"""Requests to a server at given times, and the times of their tokens.

Owns: sending, TTFT and TBT of a request. Does not know: which server, what is measured.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from benchmarks.servers import ServerError
from mooncake.messages.costs import tbt_s


class Planned(NamedTuple):
    """A request, sent `at_s` seconds after the beginning of its run."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Answer:
    """The times of a request's tokens, in seconds since the request was sent; empty if it was refused."""

    request: Planned
    token_times_s: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.token_times_s) == self.request.num_output_tokens

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """The seconds between two tokens."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def tbt_s(self) -> float:
        """The TBT of an answer of at least two tokens (`mooncake.messages.costs.tbt_s`)."""
        of_gaps_s = tbt_s(self.gaps_s)
        assert of_gaps_s is not None, "one token has no gaps"
        return of_gaps_s


class Sender:
    """A sender of completions to one server, with random prompts that the server has not cached."""

    def __init__(self, url: str, http: httpx.AsyncClient, seed: int = 0) -> None:
        self._url, self._http = url, http
        self._rng = random.Random(seed)
        self._model = ""

    async def connect(self) -> None:
        """Look up the server's model. Must be called once before anything is sent."""
        models = await self._http.get(f"{self._url}/v1/models")
        self._model = models.raise_for_status().json()["data"][0]["id"]

    async def send(self, request: Planned) -> Answer:
        """Send a request at once, whatever its `at_s`. Raises ServerError if the answer is an error."""
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(1000, 40000) for _ in range(request.num_prompt_tokens)],
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        answer = Answer(request)
        began_s = time.perf_counter()
        async with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if response.status_code == 429:
                return answer
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise ServerError(f"{self._url} answers {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    num_tokens = len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
                    answer.token_times_s += [time.perf_counter() - began_s] * num_tokens
        return answer

    async def send_all(self, schedule: Iterable[Planned]) -> list[Answer]:
        """Send each request at its own time, however many requests are in flight (an open loop)."""
        began_s = time.perf_counter()

        async def at_its_time(request: Planned) -> Answer:
            await asyncio.sleep(max(0.0, began_s + request.at_s - time.perf_counter()))
            return await self.send(request)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(at_its_time(request)) for request in schedule]
        return [task.result() for task in tasks]


def client() -> httpx.AsyncClient:
    """Return an HTTP client with enough connections for all requests in flight."""
    return httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))
