"""The mailbox of hosted layers: passes are answered in order, some at a time, and not for ever."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kernels.cpu.hosted_layers import NUM_SLOTS, LayersHelper, LayersOwner, LayersShape
from kernels.cpu.mailbox import HelperLost
from tests.deadline import DEADLINE_S
from tests.kernels.cpu.isas import SUPPORTED, library_of
from tests.kernels.cpu.test_layer import COMPUTED_BYTE

PAGE_SIZE, HIDDEN = 8, 16
SHAPE = LayersShape(num_tokens=6, num_sequences=3, num_pages=8, hidden_size=HIDDEN, dtype=torch.float32)
LAYERS = range(2, 5)


def mailbox(
    timeout_s: float = DEADLINE_S, memory: torch.Tensor | None = None
) -> tuple[LayersOwner, LayersHelper]:
    library = library_of(SUPPORTED[0])
    memory = torch.zeros(SHAPE.size_bytes, dtype=torch.uint8) if memory is None else memory
    return (
        LayersOwner(library, memory, SHAPE, timeout_s),
        LayersHelper(library, memory, SHAPE, PAGE_SIZE),
    )


@contextmanager
def hosting(helper: LayersHelper, may_answer: threading.Semaphore) -> Iterator[list[object]]:
    """Answer each pass with its hidden states and their number of sequences, when that is allowed."""
    seen: list[object] = []

    def host() -> None:
        while (asked := helper.await_pass()) is not None:
            described, hidden = asked
            tables = [table.tolist() for table in described.page_tables]
            seen.append((described.layers, described.query_lens, described.kv_lens, tables))
            assert may_answer.acquire(timeout=DEADLINE_S)
            hidden += len(tables)
            helper.answer()

    thread = threading.Thread(target=host)
    thread.start()
    try:
        yield seen
    finally:
        helper.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def ask(
    owner: LayersOwner, query_lens: list[int], kv_lens: list[int], value: float, layers: range = LAYERS
) -> int:
    tables = [np.arange(-(-kv_len // PAGE_SIZE) + 1) for kv_len in kv_lens]  # a page more than is used
    hidden = torch.full((sum(query_lens), HIDDEN), value)
    return owner.ask(layers, query_lens, kv_lens, tables, PAGE_SIZE, hidden)


def test_passes_are_answered_in_their_order_while_others_are_in_flight() -> None:
    owner, helper = mailbox()
    with hosting(helper, may_answer := threading.Semaphore(0)) as seen:
        asked, answered = [], []
        for value in range(10):
            asked.append(ask(owner, [1, 2], [9, 2], value) if value % 2 else ask(owner, [3], [24], value))
            if len(asked) == NUM_SLOTS:
                may_answer.release()
                answered.append(owner.take(asked.pop(0)))
        may_answer.release(len(asked))
        answered += [owner.take(number) for number in asked]
    expected = [torch.full((3, HIDDEN), value + 1.0 + value % 2) for value in range(10)]
    assert torch.equal(torch.stack(answered), torch.stack(expected))
    assert seen[:2] == [(LAYERS, [3], [24], [[0, 1, 2]]), (LAYERS, [1, 2], [9, 2], [[0, 1], [0]])]


def test_a_pass_without_a_helper_ends_when_the_mailbox_is_closed_or_time_is_over() -> None:
    silent, _ = mailbox(timeout_s=0.01)
    with pytest.raises(HelperLost):
        silent.take(ask(silent, [1], [1], 0.0))
    closed, helper = mailbox(timeout_s=100 * DEADLINE_S)
    timer = threading.Timer(0.05, helper.close)
    timer.start()
    with pytest.raises(HelperLost):
        closed.take(ask(closed, [1], [1], 0.0))
    with pytest.raises(HelperLost):
        closed.take(ask(closed, [1], [1], 0.0))
    timer.join()


def test_a_helper_that_stands_still_costs_the_time_of_a_layer_whatever_the_layers() -> None:
    owner, helper = mailbox(timeout_s=0.01)
    began_s = time.monotonic()
    with pytest.raises(HelperLost):
        owner.take(ask(owner, [1], [1], 0.0, range(3000)))
    assert time.monotonic() - began_s < 15
    assert helper.is_closed


def test_a_pass_may_take_longer_than_a_layer_while_the_helper_computes() -> None:
    memory, timeout_s = torch.zeros(SHAPE.size_bytes, dtype=torch.uint8), 0.5
    owner, helper = mailbox(timeout_s, memory)
    num_computed = memory.view(torch.int32)[COMPUTED_BYTE // 4 :][:1]

    def host() -> None:
        helper.await_pass()
        began_s = time.monotonic()
        while time.monotonic() < began_s + 2 * timeout_s:
            num_computed.add_(1)
        helper.answer()

    thread = threading.Thread(target=host)
    thread.start()
    assert torch.equal(owner.take(ask(owner, [1], [1], 3.0)), torch.full((1, HIDDEN), 3.0))
    thread.join(DEADLINE_S)


def test_a_late_answer_behind_a_lost_one_is_not_taken() -> None:
    owner, helper = mailbox(timeout_s=0.01)
    first, second = ask(owner, [1], [1], 0.0), ask(owner, [1], [1], 0.0)
    with pytest.raises(HelperLost):
        owner.take(first)
    for _ in range(2):
        helper.answer()
    with pytest.raises(HelperLost):
        owner.take(second)


def test_a_pass_that_is_longer_than_the_mailbox_is_refused() -> None:
    owner, _ = mailbox()
    for query_lens, kv_lens in (([7], [7]), ([1] * 4, [1] * 4), ([1], [65])):
        with pytest.raises(ValueError, match="expected a pass of at most 6 tokens of 3 sequences in 8 pages"):
            ask(owner, query_lens, kv_lens, 0.0)


def test_an_answer_that_was_not_taken_is_not_overwritten() -> None:
    owner, helper = mailbox()
    with hosting(helper, threading.Semaphore(9)):
        first = ask(owner, [1], [1], 0.0)
        for _ in range(NUM_SLOTS - 1):
            owner.take(ask(owner, [1], [1], 5.0))
        with pytest.raises(ValueError, match="a slot whose answer has not been taken"):
            ask(owner, [1], [1], 7.0)
        assert torch.equal(owner.take(first), torch.ones(1, HIDDEN))
        assert torch.equal(owner.take(ask(owner, [1], [1], 7.0)), torch.full((1, HIDDEN), 8.0))
