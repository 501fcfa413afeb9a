"""Loads and stores run beside the computation, and each layer waits for its own load only."""

import asyncio

import pytest

from tests.workers.gate import Gate
from tests.workers.prefill.test_equality import assert_equal
from tests.workers.prefill_lab import Setting, StartLab
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
