"""Migrations at random points, beside one another and beside cancels: every answer is that of a request that
stays, and nothing is left behind."""

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import transformers

from mooncake.messages.migration import PreCopied, Prepared
from mooncake.messages.requests import SamplingParams
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import IM_END_ID
from tests.workers.decode_lab import Decoded, DecodeLab, Move, StartDecodeLab
from tests.workers.mini_cluster import Sizes, tokens_of
from tests.workers.references import prompt_of
from tests.workers.test_grammars import GRAMMAR

pytestmark = pytest.mark.cluster
log = logging.getLogger(__name__)

NUM_CLIENTS = 8
WISHES = (
    SamplingParams(70, temperature=0),
    SamplingParams(60, temperature=1.1, top_p=0.95, seed=4),
    SamplingParams(60, temperature=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.4),
    SamplingParams(50, temperature=1.3, seed=6, num_logprobs=3),
    SamplingParams(60, temperature=1.5, seed=3, stop_token_ids=(IM_END_ID,), grammar=GRAMMAR),
    SamplingParams(
        50, temperature=1.0, seed=7, bad_words=((5,), (6, 7)), min_tokens=20, presence_penalty=0.5
    ),
    SamplingParams(40, temperature=1.2, seed=8, stop_token_ids=tuple(range(1, 512, 16)), min_tokens=9),
)


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """A model whose KV heads cannot be shared out evenly."""
    return tiny_model("smollm2", num_key_value_heads=3, num_hidden_layers=2)


@dataclass(frozen=True, slots=True)
class Expected:
    """An answer of a request that stays where it is."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Clients:
    """Requests one after the other, each of which moves now and then."""

    lab: DecodeLab
    rng: random.Random
    expected: list[Expected]
    inline: bool
    outcomes: Counter[str] = field(default_factory=Counter)

    async def one(self, name: str) -> None:
        rng, lab = self.rng, self.lab
        of = rng.choice(self.expected)
        tenant, at = rng.choice("ab"), rng.choice(lab.decodes)
        inline = self.inline or rng.random() < 0.5
        decoded = lab.begin(name, of.prompt, of.sampling, at, tenant=tenant, answer_id=tenant, inline=inline)
        is_cancelled = rng.random() < 0.15
        num_moves = rng.randrange(1, 4)
        for _ in range(num_moves):
            await self._some_tokens(decoded, rng.randrange(1, 15))
            if decoded.answer.ended.is_set():
                break
            await self._move(decoded)
        if is_cancelled and not decoded.answer.ended.is_set():
            await self._some_turns()
            lab.abort(decoded)
            self.outcomes["cancelled"] += 1
            return
        assert await tokens_of(decoded.answer) == of.tokens, (name, of.sampling)
        logprobs = [logprob.logprob for logprob in decoded.answer.logprobs]
        assert logprobs == pytest.approx(of.logprobs, abs=1e-4)

    async def _some_tokens(self, decoded: Decoded, num_tokens: int) -> None:
        answer = decoded.answer
        goal = len(answer.tokens) + num_tokens
        while len(answer.tokens) < goal and not answer.ended.is_set():
            await asyncio.sleep(0.001)

    async def _some_turns(self) -> None:
        for _ in range(self.rng.choice([0, 0, 3, 20, 60])):
            await asyncio.sleep(0)

    async def _move(self, decoded: Decoded) -> None:
        rng = self.rng
        destination = rng.choice([other for other in self.lab.decodes if other is not decoded.at])
        move = Move(self.lab, decoded, destination)
        for _ in range(rng.randrange(1, 4)):
            num_tokens = len(decoded.request.token_ids) + len(decoded.answer.tokens)
            wanted = rng.choice([0, 0, num_tokens + rng.randrange(20)])
            if not isinstance(await move.pre_copy(wanted), PreCopied):
                self.outcomes["ended"] += 1
                move.give_up()
                return
            await self._some_turns()
            if not isinstance(await move.prepare(), Prepared):
                self.outcomes["no room"] += 1
                return
            await self._some_turns()
        if rng.random() < 0.1:
            move.give_up()
            self.outcomes["given up"] += 1
        elif await move.finish():
            self.outcomes["moved"] += 1
        else:
            self.outcomes["ended"] += 1


@pytest.fixture(scope="module")
def known() -> dict[int, list[Expected]]:
    """Expected answers, by the number of ranks: no other size of an instance changes them."""
    return {}


async def expected_of(lab: DecodeLab, num: int) -> list[Expected]:
    expected = []
    for index in range(num):
        prompt, sampling = prompt_of(index, 1 + 7 * index % 61), WISHES[index % len(WISHES)]
        answer = lab.begin(f"stays-{index}", prompt, sampling, lab.decodes[0]).answer
        tokens = await tokens_of(answer)
        expected.append(Expected(prompt, sampling, tokens, [of.logprob for of in answer.logprobs]))
    return expected


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(num_decode=2, num_pool_pages=256, num_device_pages=256),
        Sizes(num_decode=3, num_device_pages=40, num_pool_pages=120, max_batch=4),
        Sizes(num_decode=2, num_device_pages=30, num_pool_pages=40, max_batch=6),
        Sizes(num_decode=2, block_size=1, num_device_pages=600, num_pool_pages=900),
        Sizes(num_decode=2, block_size=32, num_device_pages=64),
        Sizes(num_decode=2, num_device_pages=60, num_pool_pages=120, num_ranks=2),
    ],
    ids=["ample", "three instances", "little room", "blocks of one", "blocks of 32", "two ranks"],
)
@pytest.mark.parametrize(
    ("seed", "num_requests"),
    [(0, 30), pytest.param(1, 2200, marks=[pytest.mark.soak, pytest.mark.timeout(6000)])],
    ids=["30", "2200"],
)
async def test_answers_are_those_of_requests_that_stay(
    start_decode_lab: StartDecodeLab,
    known: dict[int, list[Expected]],
    sizes: Sizes,
    seed: int,
    num_requests: int,
) -> None:
    async with start_decode_lab(sizes, timeout_s=5000) as lab:
        if sizes.num_ranks not in known:
            known[sizes.num_ranks] = await expected_of(lab, 14)
        clients = Clients(lab, random.Random(seed), known[sizes.num_ranks], inline=False)

        async def client(numbers: range) -> None:
            for number in numbers:
                await clients.one(f"r{number}")

        async with asyncio.TaskGroup() as group:
            for first in range(NUM_CLIENTS):
                group.create_task(client(range(first, num_requests, NUM_CLIENTS)))
        await lab.assert_nothing_is_held()
    log.info("%d requests: %s", num_requests, dict(clients.outcomes))
    assert clients.outcomes["moved"] >= num_requests // 8
