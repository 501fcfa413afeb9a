"""Answers that follow a grammar, in every place and batch; and the same ones everywhere."""

import json

import pytest

from mooncake.messages.requests import SamplingParams
from tests.tiny_tokenizer import IM_END_ID, tiny_backend
from tests.workers.execution.test_draws import EVERYWHERE
from tests.workers.mini_cluster import Sizes, StartCluster, tokens_of
from tests.workers.references import Reference, prompt_of

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["moon", "cake"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}\n"
WISHES = SamplingParams(60, temperature=1.5, seed=3, stop_token_ids=(IM_END_ID,), grammar=GRAMMAR)
PROMPTS = [prompt_of(seed, 20 + seed) for seed in range(3)]
BACKEND = tiny_backend()


@EVERYWHERE
async def test_answers_follow_their_grammar_and_depend_on_the_seed_alone(
    start_cluster: StartCluster, reference: Reference, sizes: Sizes
) -> None:
    async with start_cluster(sizes) as cluster:
        alone = [
            await tokens_of(cluster.submit(f"alone-{index}", prompt, WISHES))
            for index, prompt in enumerate(PROMPTS)
        ]
        for tokens in alone:
            assert tokens[-1] == IM_END_ID
            value = json.loads(BACKEND.decode(tokens[:-1]))
            assert value["kind"] in ("moon", "cake")
            assert all(0 <= size <= 99 for size in value["sizes"])
        together = [
            cluster.submit(f"together-{index}", prompt, WISHES) for index, prompt in enumerate(PROMPTS)
        ]
        free = cluster.submit("free", PROMPTS[0], SamplingParams(20, temperature=0))
        assert [await tokens_of(answer) for answer in together] == alone
        assert await tokens_of(free) == reference(PROMPTS[0], 20)
        await cluster.assert_nothing_is_held()


async def test_a_grammar_that_cannot_be_compiled_ends_the_request(start_cluster: StartCluster) -> None:
    async with start_cluster() as cluster:
        answer = cluster.submit("bad", PROMPTS[0], SamplingParams(5, grammar="nonsense"))
        await answer.ended.wait()
        assert answer.error is not None
        assert answer.param == "grammar"
        assert answer.tokens == []
        await cluster.assert_nothing_is_held()


async def test_a_grammar_that_meets_a_limit_ends_its_request_alone(
    start_cluster: StartCluster, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_cluster() as cluster:
        grammar = await cluster.grammars.get(GRAMMAR)
        begin = type(grammar).begin

        def begin_with_another_text(self: object) -> object:
            state = begin(grammar)
            follow = state.allowed_after

            class Limited:
                error: str | None = None

                def allowed_after(self, tokens: list[int]) -> object:
                    if len(tokens) == 4:
                        self.error = "a limit"
                    return follow(tokens)

            return Limited()

        monkeypatch.setattr(type(grammar), "begin", begin_with_another_text)
        answer = cluster.submit("limited", PROMPTS[0], WISHES)
        free = cluster.submit("free", PROMPTS[1], SamplingParams(20, temperature=0))
        await answer.ended.wait()
        assert "a limit" in (answer.error or "")
        assert answer.param == "grammar"
        assert len(answer.tokens) <= 5
        assert await tokens_of(free) == reference(PROMPTS[1], 20)
        await cluster.assert_nothing_is_held()
