"""Decoding as clients see it: conversations that find their history, and refusals before the first token."""

from pathlib import Path

import pytest

from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import (
    TRANSFERS,
    body,
    cached_tokens,
    complete,
    metric,
    post,
    streaming,
    tiny_server,
)

pytestmark = pytest.mark.cluster
BLOCK_SIZE = 8
PROMPT = list(range(3, 24))


def answer_to(server: Server, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Tokens, and how many prompt tokens the pool held."""
    answer = complete(server, prompt=prompt, num_tokens=num_tokens, return_token_ids=True)
    return answer["choices"][0]["token_ids"], cached_tokens(answer)


COUPLED = ("--num-both=1",)


@pytest.mark.parametrize(
    ("arguments", "instance", "num_expected"),
    [((TRANSFERS,), "decode-0", 0), (COUPLED, "both-0", 3)],
    ids=["pair", "both roles"],
)
def test_the_next_turn_of_a_conversation_finds_prompt_and_answer(
    tiny: Path, run_dir: Path, arguments: tuple[str, ...], instance: str, num_expected: int
) -> None:
    with tiny_server(tiny, run_dir, *arguments) as server:
        answer, _ = answer_to(server, PROMPT, 30)
        assert len(answer) == 30
        num_blocks = (len(PROMPT) + 29) // BLOCK_SIZE

        def num_sealed() -> float:
            return metric(server, "mooncake_decode_sealed_blocks_total", instance=instance)

        eventually(lambda: num_sealed() >= num_blocks - len(PROMPT) // BLOCK_SIZE, "the answer is sealed")
        turn = [*PROMPT, *answer, *range(30, 37)]
        second, cached = answer_to(server, turn, 10)
        assert cached == num_blocks * BLOCK_SIZE
        again, _ = answer_to(server, turn, 10)
        assert again == second

        def num_inlined() -> float:
            return metric(server, "mooncake_decode_prompts_total", inlined="yes", instance=instance)

        eventually(lambda: num_inlined() == num_expected, "the prompts are counted")


def test_what_would_be_too_slow_is_refused_before_its_first_token(tiny: Path, run_dir: Path) -> None:
    with (
        tiny_server(tiny, run_dir, TRANSFERS, "--conductor-tbt-slo-s=0.000001") as server,
        streaming(server, prompt=PROMPT, num_tokens=400) as events,
    ):
        for _ in range(30):  # enough to learn from
            next(events)
        second = post(server, body(PROMPT, 3))
        assert second.status_code == 429
        assert int(second.headers["Retry-After"]) >= 1
        assert "conductor.tbt_slo_s" in second.json()["error"]["message"]
        assert list(events)  # the first one goes on
