"""A fixture with OpenAI's client of a front."""

import openai
import pytest

from tests.conductor.front.fakes import DEADLINE_S, Running


@pytest.fixture
def client(front: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
