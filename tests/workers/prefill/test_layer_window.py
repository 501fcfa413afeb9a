"""Device memory for some layers at a time: each is freed once stored, and loaded again in later passes."""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mooncake.config.settings import load_config
from mooncake.errors import ConfigError
from mooncake.messages.workers import Role
from mooncake.node.process_config import WorkerProcess
from mooncake.security.keys import ClusterKey
from tests.kvstore.holder import Answer
from tests.kvstore.nodes import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.workers.gate import Gate
from tests.workers.prefill.test_equality import assert_equal, cell, fail
from tests.workers.prefill.test_faults import gone
from tests.workers.prefill_lab import BLOCK_SIZE, Setting, StartLab, prefill_lab
from tests.workers.references import prompt_of
from workers.engine.batch import Chunk
from workers.execution.loading import layer_window
from workers.kvcache.copies import BlockCopy, LoadedLayer, Mark, StagedLayer
from workers.kvcache.layerwise import LayerTransfers, PassPart, PromptBlock

NUM_LAYERS, WINDOW = 4, 2
CELLS = list(itertools.product((BLOCK_SIZE, 20, 1000), (0, 2, 5)))
"""tokens of a pass, and blocks that are cached"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("window", "num_stages", "num_ranks", "overlap"),
    [(2, 1, 1, True), (2, 1, 1, False), (3, 1, 1, True), (2, 2, 1, True), (3, 1, 2, True)],
)
async def test_tokens_and_pages_are_those_of_a_device_with_all_layers(
    tmp_path: Path,
    window: int,
    num_stages: int,
    num_ranks: int,
    overlap: bool,
) -> None:
    model = tiny_model(
        "smollm2", num_key_value_heads=1 if num_ranks == 1 else 3, num_hidden_layers=3 * num_stages + 1
    )
    prompts = [prompt_of(seed, length) for seed, length in enumerate((5 * BLOCK_SIZE + 3, 5 * BLOCK_SIZE, 9))]
    async with prefill_lab(
        model, tmp_path, num_stages=num_stages, num_ranks=num_ranks, layer_window=window
    ) as lab:
        plain = [lab.plain(prompt) for prompt in prompts]
        assert lab.executor.kv.window == window
        for chunk, num_cached in CELLS if num_stages * num_ranks == 1 else CELLS[::4]:
            with cell(chunk, num_cached):
                lab.clear(*lab.prefill_nodes)
                if num_cached:
                    lab.put_local(lab.keys_of(prompts[0])[:num_cached], plain[0].blocks[:num_cached])
                results = await lab.results(Setting(chunk, overlap), prompts)
                assert results[0].num_cached_tokens == num_cached * BLOCK_SIZE
                for result, expected in zip(results, plain, strict=True):
                    assert_equal(result, expected, 0, same_arithmetic=False)


@pytest.mark.cluster
async def test_reuse_that_fails_half_way_goes_on_from_the_last_good_block(start_lab: StartLab) -> None:
    async with start_lab("tcp", layer_window=WINDOW) as lab:
        for answer in (Answer.EVICTED, Answer.DAMAGED, Answer.DIE, Answer.HANG):
            with cell(answer):
                await fail(lab, answer, 2, 1, Setting(16))


async def reaches(gate: Gate, num_marks: int) -> None:
    """So many loads and stores have been launched."""
    async with asyncio.timeout(DEADLINE_S):
        while gate.num_marks < num_marks:
            await asyncio.sleep(0.001)


@pytest.mark.cluster
async def test_layer_is_computed_when_the_one_whose_memory_it_takes_is_stored(start_lab: StartLab) -> None:
    prompt, gate = prompt_of(1, 50), Gate(store=1)
    num_marks = WINDOW + 3  # of waits for stores, and of stores of the layers 0 to 2
    async with start_lab(layer_window=WINDOW) as lab:
        plain = lab.plain(prompt)
        async with lab.running(Setting(make_copies=gate.make)):
            receiving = await lab.order(prompt)
            await gate.reached()
            await reaches(gate, num_marks)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reaches(gate, num_marks + 1), 0.2)
            assert gate.stored_layers == [0]
            gate.open()
            assert_equal(await receiving.result(), plain, 0, same_arithmetic=True)


@pytest.mark.cluster
async def test_prompt_that_is_aborted_while_a_layer_waits_leaves_nothing(start_lab: StartLab) -> None:
    gate = Gate(store=1)
    async with (
        start_lab(layer_window=WINDOW) as lab,
        lab.running(Setting(16, make_copies=gate.make)),
    ):
        receiving = await lab.order(prompt_of(1, 50))
        await gate.reached()
        lab.jobs.cancel(receiving.ref)
        gate.open()
        await gone(lab, receiving)
        await receiving.release()


class HeldStores:
    """LayerCopies whose stores from one page do not end until they are `released`."""

    def __init__(self, held_page: int) -> None:
        self._held_page, self.released = held_page, threading.Event()

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> LoadedLayer:
        return LoadedLayer(None, [])

    def stage(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> None:
        pass

    def store(self, layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
        if blocks[0].device_page == self._held_page:
            assert self.released.wait(DEADLINE_S)
        return [0] * len(blocks)

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass


def test_memory_is_not_taken_from_stores_of_a_prompt_that_was_dropped_meanwhile() -> None:
    copies = HeldStores(held_page=1)
    transfers = LayerTransfers(copies, overlap=True, window=WINDOW)
    kept, dropped = (
        PassPart(Chunk([1], 0, [page]), [], [PromptBlock(page, page, 0)], lambda _: True, lambda *_: None)
        for page in range(2)
    )
    transfers.launch_store(0, [kept, dropped])
    dropped.is_dropped = True
    waiting = transfers.launch_load(WINDOW, [kept, dropped])
    assert waiting is not None
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    copies.released.set()
    waiting.result(DEADLINE_S)
    transfers.close()


def test_checksums_of_what_was_stored_here_count_and_no_others() -> None:
    """Of a block whose first layers were fetched: the pool knows those."""
    block = PromptBlock(device_page=0, pool_page=0, next_layer=2)
    assert block.stored_checksum(2) is None
    for layer, checksum in ((2, 2**64 - 1), (3, 0)):
        block.keep_checksum(layer, checksum)
    assert [block.stored_checksum(layer) for layer in range(5)] == [None, None, 2**64 - 1, 0, None]


def process(role: Role, flags: dict[tuple[str, ...], str]) -> WorkerProcess:
    return WorkerProcess(
        cluster_key=ClusterKey.generate(),
        config=load_config(None, {}, {("worker", "prefill_layer_window"): "2", **flags}),
        role=role,
        instance="p",
        incarnation=1,
        messenger_socket="",
        modules_socket="",
        num_local_workers=1,
    )


def test_only_prefill_instances_have_a_window_if_it_is_smaller_than_their_layers() -> None:
    device = torch.device("cpu")
    assert layer_window(process(Role.PREFILL, {}), range(3, 6), device) == 2
    assert layer_window(process(Role.PREFILL, {}), range(3, 5), device) is None
    assert layer_window(process(Role.DECODE, {}), range(6), device) is None


def test_passes_that_end_in_the_middle_of_a_block_are_refused() -> None:
    flags = {("worker", "prefill_chunk"): "16", ("kvcache", "block_size"): "32"}
    with pytest.raises(ConfigError, match=r"passes of whole blocks: worker\.prefill_chunk is 16"):
        layer_window(process(Role.PREFILL, flags), range(6), torch.device("cpu"))
