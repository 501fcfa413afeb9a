"""Greedy float32 tokens equal those of `transformers`, through every process of a real cluster."""

import functools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
import transformers

from mooncake.model.checkpoint import open_checkpoint
from mooncake.model.tokenizer import load_tokenizer
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import Server
from tests.cluster.tiny_cluster import PAIR_FLAGS, TRANSFERS
from tests.tiny_models import FAMILIES, tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer
from workers.execution.weights import iter_weights

pytestmark = pytest.mark.cluster
NUM_OUTPUT_TOKENS = 24
PROMPT_LENGTHS = [5, 8, 31, 32, 33, 64, 65, 128, 200, 600]
"""around blocks of 32 tokens, and of one or two passes of 512"""
LONG_PROMPT_LENGTHS = [511, 1100]


def reference(model: transformers.PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What `generate` answers, without the prompt."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),  # else token 0 counts as padding
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def complete(
    client: openai.OpenAI, prompt: Sequence[int], num_tokens: int, stream: bool, cache_salt: str = ""
) -> list[int]:
    """The same from the server, as token ids."""
    options = {"ignore_eos": True, "return_token_ids": True, "cache_salt": cache_salt}
    model = client.models.list().data[0].id
    if not stream:
        answer = client.completions.create(
            model=model, prompt=list(prompt), max_tokens=num_tokens, temperature=0, extra_body=options
        )
        return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]
    tokens: list[int] = []
    for chunk in client.completions.create(
        model=model,
        prompt=list(prompt),
        max_tokens=num_tokens,
        temperature=0,
        extra_body=options,
        stream=True,
    ):
        for choice in chunk.choices:
            tokens += choice.token_ids  # type: ignore[attr-defined]
    return tokens


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_of_every_family(family: str, tmp_path: Path, run_dir: Path) -> None:
    model = tiny_model(family, tmp_path / "model")
    write_tiny_tokenizer(tmp_path / "model")
    rng = random.Random(family)
    prompts = [[rng.randrange(512) for _ in range(length)] for length in (1, 7, 8, 9, 40, 41, 120)]
    expected = [reference(model, prompt, 16) for prompt in prompts]
    arguments = [f"--model={tmp_path / 'model'}", "--kvcache-block-size=8", "--worker-prefill-chunk=20"]
    sizes = ["--kvcache-pool-bytes=16MiB", "--kvcache-device-bytes=16MiB", *PAIR_FLAGS, TRANSFERS]
    with (
        ForkedServer(*arguments, *sizes, run_dir=run_dir) as server,
        ThreadPoolExecutor(8) as threads,
    ):
        client = client_of(server)
        assert [complete(client, prompt, 16, stream=False) for prompt in prompts] == expected
        assert (
            list(threads.map(lambda prompt: complete(client, prompt, 16, stream=True), prompts)) == expected
        )


@pytest.fixture(scope="module")
def smollm2() -> transformers.PreTrainedModel:
    """The default model in float32."""
    checkpoint = open_checkpoint(None)
    config = transformers.LlamaConfig(**checkpoint.config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = dict(iter_weights(checkpoint, range(config.num_hidden_layers), lambda done, total: None))
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    # Buffers made on the meta device have no values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.fixture(
    scope="module",
    params=[PROMPT_LENGTHS, pytest.param(LONG_PROMPT_LENGTHS, marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def prompts_of_text(request: pytest.FixtureRequest) -> list[list[int]]:
    """Real text in many lengths."""
    text = (Path(__file__).parent.parent.parent / "LICENSE").read_text()
    tokens = load_tokenizer(open_checkpoint(None)).encode(text, add_special_tokens=False)
    return [tokens[7 * index : 7 * index + length] for index, length in enumerate(request.param)]


@pytest.fixture(scope="module")
def is_greedy(smollm2: transformers.PreTrainedModel) -> Callable[[list[int], list[int]], bool]:
    """Whether every token of an answer is the likeliest behind those before it (one pass tells)."""

    @functools.cache
    def check(prompt: tuple[int, ...], answer: tuple[int, ...]) -> bool:
        with torch.inference_mode():
            logits = smollm2(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits
        return tuple(logits[0].argmax(-1).tolist()) == answer

    return lambda prompt, answer: check(tuple(prompt), tuple(answer))


@pytest.mark.parametrize(
    ("num_at_once", "stream", "cache_salt"),
    [(1, False, "a"), (8, True, "b"), (1, True, "b"), (8, False, "a")],
    ids=["alone", "eight-streaming", "alone-streaming-cached", "eight-cached"],
)
def test_smollm2(
    default_server: Server,
    prompts_of_text: list[list[int]],
    is_greedy: Callable[[list[int], list[int]], bool],
    num_at_once: int,
    stream: bool,
    cache_salt: str,
) -> None:
    """A salt's first round computes every prompt; its second one finds all full blocks in the pools."""
    client = client_of(default_server)

    def answer(prompt: list[int]) -> list[int]:
        return complete(client, prompt, NUM_OUTPUT_TOKENS, stream, cache_salt)

    with ThreadPoolExecutor(num_at_once) as threads:
        answers = list(threads.map(answer, prompts_of_text))
    for prompt, tokens in zip(prompts_of_text, answers, strict=True):
        assert len(tokens) == NUM_OUTPUT_TOKENS
        assert is_greedy(prompt, tokens), f"{len(prompt)} tokens: {tokens}"
