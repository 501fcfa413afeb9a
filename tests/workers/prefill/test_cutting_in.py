"""A short prompt is computed between two layers of another tenant's long one."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kvstore.nodes import DEADLINE_S
from tests.workers.prefill.test_equality import BLOCK_SIZE, assert_equal
from tests.workers.prefill_lab import Lab, Receiving, Setting, StartLab
from tests.workers.references import prompt_of
from workers.execution.executor import Executor

NUM_PAGES_OF_SHORT = -(-20 // BLOCK_SIZE)

pytestmark = pytest.mark.cluster


class Held:
    """Layer 1 of the first pass ends when `let_go` is called."""

    def __init__(self, executor: Executor) -> None:
        self._forward = executor.model.forward_layer
        self._reached, self._may_go_on = threading.Event(), threading.Event()
        self.computed: list[tuple[int, int]] = []
        """layer and number of tokens, in order of their ends"""
        executor.model.forward_layer = self._forward_layer  # type: ignore[method-assign]

    def _forward_layer(self, layer: int, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        if layer == 1 and not self._reached.is_set():
            self._reached.set()
            assert self._may_go_on.wait(DEADLINE_S)
        result = self._forward(layer, hidden, *rest)
        self.computed.append((layer, len(hidden)))
        return result

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, DEADLINE_S)

    def let_go(self) -> None:
        self._may_go_on.set()


def noting_cut_ins(executor: Executor) -> asyncio.Event:
    """Set when a pass waits for the end of a layer."""
    real, asked = executor.cut_in, asyncio.Event()

    async def noted(call: Callable[[], Any], on_cancel: Callable[[], None] | None = None) -> Any:
        cutting_in = asyncio.ensure_future(real(call, on_cancel))
        await asyncio.sleep(0)
        asked.set()
        try:
            return await cutting_in
        except asyncio.CancelledError:
            cutting_in.cancel()
            raise

    executor.cut_in = noted  # type: ignore[method-assign, assignment]
    return asked


async def long_and_short(lab: Lab, held: Held) -> tuple[Receiving, Receiving]:
    """A short prompt of `b` stands behind layer 1 of a long one of `a`."""
    asked = noting_cut_ins(lab.executor)
    long = await lab.order(prompt_of(1, 90), tenant="a")
    await held.reached()
    short = await lab.order(prompt_of(2, 20), tenant="b")
    async with asyncio.timeout(DEADLINE_S):
        await asked.wait()
    return long, short


async def test_a_short_prompt_ends_before_the_pass_of_a_long_one(start_lab: StartLab) -> None:
    async with start_lab() as lab:
        plain = [lab.plain(prompt_of(1, 90)), lab.plain(prompt_of(2, 20))]
        held = Held(lab.executor)
        async with lab.running(Setting(prefill_chunk=60)):
            long, short = await long_and_short(lab, held)
            held.let_go()
            assert_equal(await short.result(), plain[1], 0, same_arithmetic=False)
            assert_equal(await long.result(), plain[0], 0, same_arithmetic=False)
            layers = range(lab.executor.model.spec.num_layers)
            cut_in = [(layer, 20) for layer in layers]
            assert held.computed[: len(layers) + 2] == [(0, 60), (1, 60), *cut_in]


async def test_a_short_prompt_does_not_wait_behind_one_that_waits_for_memory(start_lab: StartLab) -> None:
    async with start_lab() as lab:
        plain = [lab.plain(prompt_of(index, num)) for index, num in ((1, 90), (3, 90), (2, 20))]
        held, kv = Held(lab.executor), lab.executor.kv
        async with lab.running(Setting(prefill_chunk=60)):
            asked = noting_cut_ins(lab.executor)
            long = await lab.order(prompt_of(1, 90), tenant="a")
            await held.reached()
            taken = kv.pages.allocate(kv.pages.num_free - NUM_PAGES_OF_SHORT)
            waiting = await lab.order(prompt_of(3, 90), tenant="a")
            short = await lab.order(prompt_of(2, 20), tenant="b")
            async with asyncio.timeout(DEADLINE_S):
                await asked.wait()
            held.let_go()
            assert_equal(await short.result(), plain[2], 0, same_arithmetic=False)
            kv.pages.free(taken)
            for receiving, expected in ((long, plain[0]), (waiting, plain[1])):
                assert_equal(await receiving.result(), expected, 0, same_arithmetic=False)


@pytest.mark.parametrize("aborted", ["short", "long"])
async def test_either_can_be_aborted_while_it_cuts_in(start_lab: StartLab, aborted: str) -> None:
    async with start_lab() as lab:
        plain = {"long": lab.plain(prompt_of(1, 90)), "short": lab.plain(prompt_of(2, 20))}
        held = Held(lab.executor)
        async with lab.running(Setting(prefill_chunk=60)):
            long, short = await long_and_short(lab, held)
            gone, stays = (short, long) if aborted == "short" else (long, short)
            lab.jobs.cancel(gone.ref)
            await asyncio.sleep(0)
            held.let_go()
            other = "long" if aborted == "short" else "short"
            assert_equal(await stays.result(), plain[other], 0, same_arithmetic=False)
            assert not gone.answered.done()
            await gone.release()
