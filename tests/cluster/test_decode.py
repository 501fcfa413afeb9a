"""Decoding as clients see it: conversations that find their history, and refusals before the first token."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import Server, eventually
from tests.cluster.test_pool import metric
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
BLOCK_SIZE = 8
PROMPT = list(range(3, 24))


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    directory = tmp_path / "tiny"
    tiny_model("smollm2", directory)
    write_tiny_tokenizer(directory)
    return [
        f"--model={directory}",
        f"--kvcache-block-size={BLOCK_SIZE}",
        "--kvcache-pool-bytes=8MiB",
        "--kvcache-device-bytes=8MiB",
    ]


def body(prompt: list[int], num_tokens: int, **options: object) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }


def complete(server: Server, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Tokens, and how many prompt tokens the pool held."""
    response = httpx.post(f"{server.url}/v1/completions", json=body(prompt, num_tokens), timeout=DEADLINE_S)
    answer = response.raise_for_status().json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


@pytest.mark.parametrize("inlined", [False, True])
def test_the_next_turn_of_a_conversation_finds_prompt_and_answer(
    arguments: list[str], run_dir: Path, inlined: bool
) -> None:
    inlining = ["--worker-inline-prefill-tokens=15"] if inlined else []
    with ForkedServer(*arguments, *inlining, run_dir=run_dir) as server:
        answer, _ = complete(server, PROMPT, 30)
        assert len(answer) == 30
        num_blocks = (len(PROMPT) + 29) // BLOCK_SIZE

        def num_sealed() -> float:
            return metric(server, "mooncake_decode_sealed_blocks_total", instance="decode-0")

        eventually(lambda: num_sealed() >= num_blocks - len(PROMPT) // BLOCK_SIZE, "the answer is sealed")
        turn = [*PROMPT, *answer, *range(30, 37)]
        second, cached = complete(server, turn, 10)
        assert cached == num_blocks * BLOCK_SIZE
        again, _ = complete(server, turn, 10)
        assert again == second

        def num_inlined() -> float:
            return metric(server, "mooncake_decode_prompts_total", inlined="yes", instance="decode-0")

        if inlined:
            eventually(lambda: num_inlined() == 2, "both are counted")
        else:
            assert num_inlined() == 0


def test_what_would_be_too_slow_is_refused_before_its_first_token(
    arguments: list[str], run_dir: Path
) -> None:
    with (
        ForkedServer(*arguments, "--conductor-tbt-slo-s=0.000001", run_dir=run_dir) as server,
        httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client,
        client.stream("POST", "/v1/completions", json=body(PROMPT, 400, stream=True)) as first,
    ):
        events = first.iter_lines()
        for _ in range(30):  # enough to learn from
            next(events)
        second = httpx.post(f"{server.url}/v1/completions", json=body(PROMPT, 3), timeout=DEADLINE_S)
        assert second.status_code == 429
        assert int(second.headers["Retry-After"]) >= 1
        assert "conductor.tbt_slo_s" in second.json()["error"]["message"]
        assert sum(line.startswith("data: ") for line in events) > 0  # the first one goes on
