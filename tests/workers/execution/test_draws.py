"""Sampling through prefill and decode: what transformers would draw and report, in every place and batch."""

import msgspec
import pytest
import torch
import transformers

from mooncake.messages.requests import SamplingParams
from tests.workers.mini_cluster import Sizes, StartCluster, tokens_of
from tests.workers.references import Reference, generated_tokens, prompt_of

NUM_TOKENS = 14
GREEDY = SamplingParams(NUM_TOKENS, temperature=0)
PROMPTS = [prompt_of(seed, 20 + seed) for seed in range(4)]
EVERYWHERE = pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(inline=True),
        Sizes(num_device_pages=12),
        Sizes(lost_after=(3, 4), num_decode=2),
    ],
    ids=["prefilled", "inlined", "preempted", "interrupted"],
)


@EVERYWHERE
async def test_greedy_tokens_under_rules_are_those_of_transformers(
    start_cluster: StartCluster, reference: Reference, model: transformers.PreTrainedModel, sizes: Sizes
) -> None:
    plain = [reference(prompt, NUM_TOKENS) for prompt in PROMPTS]
    stop = plain[2][3]
    bias = {plain[3][0]: -3.0, 77: 1.5}
    biased = transformers.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = [
        generated_tokens(model, PROMPTS[0], NUM_TOKENS, repetition_penalty=1.3),
        generated_tokens(model, PROMPTS[1], NUM_TOKENS, bad_words_ids=[[plain[1][0]], plain[1][4:6]]),
        generated_tokens(model, PROMPTS[2], NUM_TOKENS, eos_token_id=stop, min_new_tokens=9, pad_token_id=0),
        generated_tokens(
            model,
            PROMPTS[3],
            NUM_TOKENS,
            repetition_penalty=1.1,
            logits_processor=transformers.LogitsProcessorList([biased]),
        ),
    ]
    assert all(tokens != other for tokens, other in zip(expected, plain, strict=True))
    wishes = [
        {"repetition_penalty": 1.3},
        {"bad_words": ((plain[1][0],), tuple(plain[1][4:6]))},
        {"stop_token_ids": (stop,), "min_tokens": 9},
        {"repetition_penalty": 1.1, "logit_bias": bias},
    ]
    async with start_cluster(sizes) as cluster:
        answers = [
            cluster.submit(str(index), prompt, msgspec.structs.replace(GREEDY, **fields))
            for index, (prompt, fields) in enumerate(zip(PROMPTS, wishes, strict=True))
        ]
        neutral = cluster.submit("neutral", PROMPTS[0], GREEDY)
        assert [await tokens_of(answer) for answer in answers] == expected
        assert await tokens_of(neutral) == plain[0]
        await cluster.assert_nothing_is_held()


@EVERYWHERE
async def test_draws_under_rules_depend_on_the_seed_alone(start_cluster: StartCluster, sizes: Sizes) -> None:
    wishes = SamplingParams(
        NUM_TOKENS,
        temperature=1.2,
        min_p=0.02,
        seed=5,
        repetition_penalty=1.2,
        presence_penalty=0.6,
        frequency_penalty=0.9,
        bad_words=((1, 2), (30,)),
        num_logprobs=2,
    )
    async with start_cluster(sizes) as cluster:
        alone = [
            await tokens_of(cluster.submit(f"alone-{index}", prompt, wishes))
            for index, prompt in enumerate(PROMPTS)
        ]
        together = [
            cluster.submit(f"together-{index}", prompt, wishes) for index, prompt in enumerate(PROMPTS)
        ]
        assert [await tokens_of(answer) for answer in together] == alone
        unpenalized = msgspec.structs.replace(wishes, presence_penalty=0.0, frequency_penalty=0.0)
        other = [
            await tokens_of(cluster.submit(f"other-{index}", prompt, unpenalized))
            for index, prompt in enumerate(PROMPTS)
        ]
        assert other != alone
        await cluster.assert_nothing_is_held()


@EVERYWHERE
async def test_logprobs_are_those_of_the_models_own_logits(
    start_cluster: StartCluster, model: transformers.PreTrainedModel, sizes: Sizes
) -> None:
    wishes = [
        msgspec.structs.replace(GREEDY, num_logprobs=3),
        SamplingParams(NUM_TOKENS, temperature=0.7, top_k=5, seed=2, num_logprobs=0),
        SamplingParams(NUM_TOKENS, temperature=1.3, presence_penalty=1.5, seed=3, num_logprobs=20),
        GREEDY,
    ]
    async with start_cluster(sizes) as cluster:
        answers = [
            cluster.submit(str(index), prompt, sampling)
            for index, (prompt, sampling) in enumerate(zip(PROMPTS, wishes, strict=True))
        ]
        for prompt, sampling, answer in zip(PROMPTS, wishes, answers, strict=True):
            tokens = await tokens_of(answer)
            if sampling.num_logprobs is None:
                assert answer.logprobs == []
                continue
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1)
            assert len(answer.logprobs) == NUM_TOKENS
            for row, (token, logprobs) in enumerate(zip(tokens, answer.logprobs, strict=True)):
                assert logprobs.logprob == pytest.approx(expected[row, token].item(), abs=1e-4)
                assert len(logprobs.top_token_ids) == sampling.num_logprobs
                of_top = expected[row, logprobs.top_token_ids].tolist()
                assert logprobs.top_logprobs == pytest.approx(of_top, abs=1e-4)
                likeliest = expected[row].topk(sampling.num_logprobs).values.tolist()
                assert logprobs.top_logprobs == pytest.approx(likeliest, abs=1e-4)
        await cluster.assert_nothing_is_held()
