"""Loads and stores run beside the computation, and each layer waits for its own load only."""

import asyncio
import threading

import pytest

from tests.kvstore.holder import Answer
from tests.kvstore.nodes import DEADLINE_S
from tests.workers.gate import Gate
from tests.workers.prefill.test_equality import assert_equal, holding
from tests.workers.prefill_lab import BLOCK_SIZE, Setting, StartLab, endless_patience
from tests.workers.references import prompt_of

pytestmark = pytest.mark.cluster

NUM_LAYERS = 4


async def test_computation_waits_for_no_store(start_lab: StartLab) -> None:
    prompt, gate = prompt_of(1, 50), Gate(store=0)
    async with start_lab() as lab:
        plain = lab.plain(prompt)
        async with lab.running(Setting(25, make_copies=gate.make)):
            receiving = await lab.order(prompt)
            await gate.reached()
            while gate.num_marks < 2 * NUM_LAYERS:  # every layer of both passes has been computed
                await asyncio.sleep(0.001)
            assert gate.stored_layers == []
            assert not receiving.answered.done()  # whose KVCache is not on its way yet
            gate.open()
            result = await receiving.result()
        assert gate.stored_layers == [0, 1, 2, 3] * 2
        assert_equal(result, plain, 0, same_arithmetic=False)


async def test_layer_is_computed_while_the_next_one_is_loaded(start_lab: StartLab) -> None:
    prompt, gate = prompt_of(2, 50), Gate(load=2)
    async with start_lab() as lab:
        plain = lab.plain(prompt)
        lab.put(lab.prefill_node, lab.keys_of(prompt)[:3], plain.blocks[:3])
        async with lab.running(Setting(make_copies=gate.make)):
            receiving = await lab.order(prompt)
            await gate.reached()
            while gate.stored_layers != [0, 1]:
                await asyncio.sleep(0.001)
            gate.open()
            assert_equal(await receiving.result(), plain, 3, same_arithmetic=False)
        assert gate.stored_layers == [0, 1, 2, 3]


async def test_all_chunks_are_computed_up_to_the_layer_that_has_yet_to_arrive(start_lab: StartLab) -> None:
    """The holder keeps the third layer back until the worker has computed two layers of three chunks."""
    prompt, arrives = prompt_of(4, 8 * BLOCK_SIZE), threading.Event()
    async with start_lab("tcp") as lab:
        plain, keys = lab.plain(prompt), lab.keys_of(prompt)[:5]
        computed = lab.computed_layers()
        with endless_patience(), holding(lab, keys, plain, Answer.IN_PIECES, 2, arrives.wait) as holder:
            async with lab.running(Setting(BLOCK_SIZE)):
                receiving = await lab.order(prompt, lab.source(holder.address, len(keys)))
                try:
                    async with asyncio.timeout(DEADLINE_S):
                        while computed != [0, 0, 0, 1, 1, 1]:
                            await asyncio.sleep(0.001)
                finally:
                    arrives.set()
                assert_equal(await receiving.result(), plain, len(keys), same_arithmetic=False)
        assert computed == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


async def test_without_overlap_a_layer_is_stored_before_the_next_is_computed(start_lab: StartLab) -> None:
    gate = Gate(store=1)
    async with (
        start_lab() as lab,
        lab.running(Setting(overlap=False, make_copies=gate.make)),
    ):
        receiving = await lab.order(prompt_of(3, 50))
        await gate.reached()
        assert (gate.stored_layers, gate.num_marks) == ([0], 2)
        gate.open()
        await receiving.result()
