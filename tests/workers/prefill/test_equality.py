"""Whatever the way to the KVCache of a prompt: the same greedy tokens, and the same pages."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers

from kvstore.client.worker_client import WorkerClient
from mooncake.config.sections import KVCacheConfig, TransportChoice
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import COMPUTED, REMOTE, Tier
from tests.kvstore.holder import Answer, HandMadeHolder
from tests.kvstore.nodes import Node
from tests.tiny_models import tiny_model
from tests.workers.prefill_lab import (
    BLOCK_SIZE,
    FINGERPRINT,
    Lab,
    PrefillPart,
    Result,
    Setting,
    StartLab,
    endless_patience,
    prefill_lab,
    until,
)
from tests.workers.references import prompt_of

pytestmark = pytest.mark.cluster

SETTINGS = [Setting(chunk, overlap) for overlap, chunk in itertools.product((True, False), (5, 20, 1000))]
PLACES = [(1, 1), (2, 1), (3, 1), (1, 2)]
"""stages and ranks of the prefill instance"""
IN_PLACES = pytest.mark.parametrize(
    ("num_stages", "num_ranks"),
    [PLACES[0], pytest.param(*PLACES[1], marks=pytest.mark.soak), *PLACES[2:]],
)


@pytest.fixture(scope="module")
def models(model: transformers.PreTrainedModel) -> dict[int, transformers.PreTrainedModel]:
    """By the number of ranks: two cannot share three KV heads out evenly."""
    return {1: model, 2: tiny_model("smollm2", num_key_value_heads=3, num_hidden_layers=2)}


def assert_equal(result: Result, plain: Result, num_reused_blocks: int, *, same_arithmetic: bool) -> None:
    """Reused blocks are those of the plain run; others are as far as the sums were made in the same order."""
    assert result.tokens == plain.tokens
    for index, (block, expected) in enumerate(zip(result.blocks, plain.blocks, strict=True)):
        if index < num_reused_blocks or same_arithmetic:
            assert block == expected, f"block {index}"
        else:
            values, wanted = (np.frombuffer(data, np.float32) for data in (block, expected))
            np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-5)


@contextlib.contextmanager
def cell(*coordinates: object) -> Iterator[None]:
    """One of many in a lab: says which one failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {coordinates}")
        raise


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@IN_PLACES
async def test_any_prefix_from_any_tier_in_any_chunks_stages_and_ranks(
    models: dict[int, transformers.PreTrainedModel],
    tmp_path: Path,
    num_stages: int,
    num_ranks: int,
    transport: TransportChoice,
) -> None:
    """Each number of blocks from each tier in each place. One stage meets all settings with each number from
    its DRAM; elsewhere they take turns."""
    ssd = KVCacheConfig(ssd_dirs=[tmp_path], ssd_bytes=4 << 20)  # type: ignore[arg-type]
    tiers = ["dram", "ssd", "shm"] if transport == "auto" else ["tcp"]
    prefixes = [(5 * BLOCK_SIZE + 3, num_blocks) for num_blocks in range(1, 6)] + [(5 * BLOCK_SIZE, 5)]
    turns = itertools.cycle(SETTINGS)
    for _ in range(PLACES.index((num_stages, num_ranks))):
        next(turns)  # so that a number meets others there
    async with prefill_lab(
        models[num_ranks],
        tmp_path,
        transport,
        ssd if transport == "auto" else None,
        num_pages=16 if transport == "auto" else 96,
        num_stages=num_stages,
        num_ranks=num_ranks,
    ) as lab:
        holder = await lab.holder(transport)
        for tier, (length, num_blocks) in itertools.product(tiers, prefixes):
            meets_all = tier == "dram" and num_stages * num_ranks == 1
            for setting in SETTINGS if meets_all else [next(turns)]:
                with cell(tier, length, num_blocks, setting):
                    await reuse(lab, holder, tier, length, num_blocks, setting)
        await lab.assert_nothing_is_held(holder[1])
        await holder[1].close()


async def reuse(
    lab: Lab, holder: tuple[Node, WorkerClient], tier: str, length: int, num_blocks: int, setting: Setting
) -> None:
    """A prompt of which `num_blocks` are in that tier, and nowhere else."""
    prompt = prompt_of(length, length)
    plain, keys = lab.plain(prompt), lab.keys_of(prompt)
    lab.clear(*lab.prefill_nodes)
    source = None
    if tier in ("shm", "tcp"):
        node, client = holder
        lab.clear(node)
        lab.put(node, keys[:num_blocks], plain.blocks[:num_blocks])
        source = lab.source(client.address, len(keys))  # believed to have more than it has
    else:
        lab.put_local(keys[:num_blocks], plain.blocks[:num_blocks])
        if tier == "ssd":
            for part in lab.parts:
                push_out(lab, part, keys[:num_blocks])
    with endless_patience():
        (result,) = await lab.results(setting, [prompt], source)
    num_cached = min(num_blocks * BLOCK_SIZE, length - 1)
    assert result.num_cached_tokens == num_cached
    where = REMOTE if source is not None else tier
    assert lab.runner.num_tokens == {where: num_cached, COMPUTED: length - num_cached}
    assert_equal(result, plain, num_blocks, same_arithmetic=False)
    for node in lab.prefill_nodes:
        with lab.client(node) as pool:
            assert pool.prefix_len(keys) == len(keys)  # sealed, wherever they came from


def push_out(lab: Lab, part: PrefillPart, keys: list[BlockKey]) -> None:
    """Stores others until none of `keys` is in DRAM."""
    numbers = itertools.count(1)
    with lab.client(part.node) as pool:

        def is_out() -> bool:
            key = next(numbers).to_bytes(16, "big")
            pool.put([key], [bytes(part.layout.block_bytes)])
            return pool.exists(keys) == [Tier.SSD] * len(keys)

        until(is_out, f"{keys} on SSD only")


@pytest.mark.parametrize(("num_stages", "overlap"), [(1, True), (1, False), (2, True), (3, True)])
async def test_prompts_in_one_pass_are_computed_as_if_alone(
    start_lab: StartLab, num_stages: int, overlap: bool
) -> None:
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 7, 8, 30, 3, 41))]
    async with start_lab(num_stages=num_stages) as lab:
        plain = [lab.plain(prompt) for prompt in prompts]
        for chunk in (4, 16, 200):
            lab.clear(*lab.prefill_nodes)
            results = await lab.results(Setting(chunk, overlap), prompts)
            for result, alone in zip(results, plain, strict=True):
                assert result.num_cached_tokens == 0
                assert_equal(result, alone, 0, same_arithmetic=False)


async def test_overlap_changes_no_bit(start_lab: StartLab) -> None:
    prompt = prompt_of(3, 61)
    async with start_lab() as lab:
        for chunk in (7, 1000):
            lab.clear(lab.prefill_node)
            (without,) = await lab.results(Setting(chunk, overlap=False), [prompt])
            lab.clear(lab.prefill_node)
            (with_overlap,) = await lab.results(Setting(chunk), [prompt])
            assert_equal(with_overlap, without, 0, same_arithmetic=True)


@IN_PLACES
async def test_reuse_that_fails_half_way_goes_on_from_the_last_good_block(
    models: dict[int, transformers.PreTrainedModel], tmp_path: Path, num_stages: int, num_ranks: int
) -> None:
    """Each failure at each layer; what is in the own pool, and whether copies overlap, take turns."""
    model = models[num_ranks]
    failures = [
        *itertools.product(
            (Answer.EVICTED, Answer.DAMAGED, Answer.DIE), range(model.config.num_hidden_layers)
        ),
        (Answer.HANG, num_stages - 1),
    ]
    turns = itertools.cycle([(2, True), (0, True), (2, False), (0, True), (2, True)])
    async with prefill_lab(model, tmp_path, "tcp", num_stages=num_stages, num_ranks=num_ranks) as lab:
        for answer, layer in failures:
            num_local, overlap = next(turns)
            with cell(answer, layer, num_local, overlap):
                await fail(lab, answer, layer, num_local, Setting(16, overlap))


async def fail(lab: Lab, answer: Answer, layer: int, num_local: int, setting: Setting) -> None:
    """A prompt of which the own pool has `num_local` blocks, and a holder that does not serve the others."""
    prompt = prompt_of(4, 5 * BLOCK_SIZE + 3)
    plain, keys = lab.plain(prompt), lab.keys_of(prompt)
    lab.clear(*lab.prefill_nodes)
    lab.put_local(keys[:num_local], plain.blocks[:num_local])
    with (
        holding(lab, keys, plain, answer, layer) as holder,
        contextlib.nullcontext() if answer is Answer.HANG else endless_patience(),
    ):
        source = lab.source(holder.address, len(keys))
        (result,) = await lab.results(setting, [prompt], source)
    assert_equal(result, plain, num_local, same_arithmetic=False)
    num_good = 4 if answer is Answer.EVICTED else num_local
    if answer is Answer.DAMAGED:
        num_good = result.num_cached_tokens // BLOCK_SIZE
        assert num_local <= num_good <= 4
    assert result.num_cached_tokens == num_good * BLOCK_SIZE
    for node in lab.prefill_nodes:
        with lab.client(node) as pool:
            assert pool.verify(keys).num_intact == len(keys)


@contextlib.contextmanager
def holding(
    lab: Lab,
    keys: list[BlockKey],
    plain: Result,
    answer: Answer,
    at_layer: int,
    pause: Callable[[], object] = lambda: None,
    asked: threading.Event | None = None,
) -> Iterator[HandMadeHolder]:
    """A holder of all blocks that answers so when it is `asked` for `at_layer`."""
    blocks = dict(zip(keys, plain.blocks, strict=False))
    once = threading.Lock()

    def decide(layer: int) -> Answer:
        if layer < at_layer:
            return Answer.SERVE
        if asked is not None:
            asked.set()
        return answer if layer == at_layer and once.acquire(blocking=False) else Answer.SERVE

    holder = HandMadeHolder(FINGERPRINT, lab.layout, blocks, decide, pause)
    try:
        yield holder
    finally:
        holder.close()
