"""The reader of bodies: whose turn it is to have a grammar compiled."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from conductor.front.caches.beginning import Beginning
from conductor.front.openai.body import ReceivedBody
from conductor.front.requests import reading
from conductor.front.requests.reading import Reading
from conductor.front.requests.validation import ApiEndpoint, Job
from mooncake.errors import OverloadedError
from mooncake.model.grammar import Grammars
from mooncake.security.api_keys import ApiKey
from tests.conductor.front.fakes import MODEL_NAME, byte_model

MANY, ONE = (ApiKey(name=name, sha256=digit * 64) for name, digit in (("many", "0"), ("one", "1")))


def body_with_schema(number: int) -> ReceivedBody:
    schema = {"name": "x", "schema": {"const": number}}
    response_format = {"type": "json_schema", "json_schema": schema}
    body = ReceivedBody()
    body.add(json.dumps({"model": MODEL_NAME, "prompt": "hi", "response_format": response_format}).encode())
    return body


def no_cache(name: str) -> Beginning:
    raise AssertionError(name)


async def test_grammars_of_one_key_that_wait_keep_no_other_key_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"

    def compile_when_told(_grammars: Grammars, _text: str) -> None:
        while not go.exists():
            os.sched_yield()

    monkeypatch.setattr(Grammars, "compile", compile_when_told)
    monkeypatch.setattr(reading, "_MAX_WAITING_GRAMMARS", 2)
    reader = Reading(byte_model(), MODEL_NAME, 8, lambda: False)
    running = asyncio.create_task(reader.run())

    def ask(key: ApiKey, number: int) -> asyncio.Task[Job]:
        body = body_with_schema(number)
        return asyncio.create_task(reader.job(ApiEndpoint.COMPLETION, body, key, no_cache))

    of_many = [ask(MANY, number) for number in range(6)]
    await asyncio.sleep(0)
    of_one = ask(ONE, 6)
    await asyncio.sleep(0)
    go.touch()
    await of_one
    results = await asyncio.gather(*of_many, return_exceptions=True)
    assert any(isinstance(result, OverloadedError) for result in results)
    running.cancel()
    await asyncio.wait([running])
