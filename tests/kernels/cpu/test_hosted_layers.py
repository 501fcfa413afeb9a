"""The mailbox of hosted layers: passes are answered in order, some at a time, and not for ever."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kernels.cpu.hosted_layers import NUM_SLOTS, LayersHelper, LayersOwner, LayersShape
from kernels.cpu.mailbox import COUNTERS_BYTES, HelperLost, Wire
from tests.deadline import DEADLINE_S
from tests.kernels.cpu.isas import SUPPORTED, library_of
from tests.kernels.cpu.test_layer import COMPUTED_BYTE

PAGE_SIZE, HIDDEN = 8, 16
SHAPE = LayersShape(num_tokens=6, num_sequences=3, num_pages=8, hidden_size=HIDDEN, dtype=torch.float32)
LAYERS = range(2, 5)
WIRED = pytest.mark.parametrize("is_wired", [False, True], ids=["shared", "stream"])


def mailbox(
    timeout_s: float = DEADLINE_S,
    memory: torch.Tensor | None = None,
    shape: LayersShape = SHAPE,
    *,
    is_wired: bool = False,
) -> tuple[LayersOwner, LayersHelper]:
    """Both ends of one mailbox in `memory`, or of two that a stream connects."""
    library = library_of(SUPPORTED[0])
    if is_wired:
        near, far = socket.socketpair()
        here, there = (torch.zeros(shape.size_bytes, dtype=torch.uint8) for _ in range(2))
        owner = LayersOwner(library, here, shape, timeout_s, Wire(near, timeout_s))
        return owner, LayersHelper(library, there, shape, Wire(far, None))
    memory = torch.zeros(SHAPE.size_bytes, dtype=torch.uint8) if memory is None else memory
    return (
        LayersOwner(library, memory, SHAPE, timeout_s),
        LayersHelper(library, memory, SHAPE),
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


@WIRED
def test_passes_are_answered_in_their_order_while_others_are_in_flight(*, is_wired: bool) -> None:
    owner, helper = mailbox(is_wired=is_wired)
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


@WIRED
def test_a_pass_without_a_helper_ends_when_the_mailbox_is_closed_or_time_is_over(*, is_wired: bool) -> None:
    silent, _silent_helper = mailbox(timeout_s=0.01, is_wired=is_wired)
    with pytest.raises(HelperLost):
        silent.take(ask(silent, [1], [1], 0.0))
    closed, helper = mailbox(timeout_s=100 * DEADLINE_S, is_wired=is_wired)
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


@WIRED
def test_an_answer_that_was_not_taken_is_not_overwritten(*, is_wired: bool) -> None:
    owner, helper = mailbox(is_wired=is_wired)
    with hosting(helper, threading.Semaphore(9)):
        first = ask(owner, [1], [1], 0.0)
        for _ in range(NUM_SLOTS - 1):
            owner.take(ask(owner, [1], [1], 5.0))
        with pytest.raises(ValueError, match="a slot whose answer has not been taken"):
            ask(owner, [1], [1], 7.0)
        assert torch.equal(owner.take(first), torch.ones(1, HIDDEN))
        assert torch.equal(owner.take(ask(owner, [1], [1], 7.0)), torch.full((1, HIDDEN), 8.0))


def test_long_passes_cross_in_a_stream_that_has_room_for_neither() -> None:
    shape = LayersShape(1 << 14, 3, 1 << 12, HIDDEN, torch.float32)
    owner, helper = mailbox(shape=shape, is_wired=True)
    num_tokens = shape.num_tokens  # 1 MiB each way, more than both sockets hold
    with hosting(helper, threading.Semaphore(9)):
        asked = [ask(owner, [num_tokens], [num_tokens], value) for value in range(NUM_SLOTS)]
        for value, number in enumerate(asked):
            assert torch.equal(owner.take(number), torch.full((num_tokens, HIDDEN), value + 1.0))


def test_a_helper_that_takes_nothing_from_the_stream_counts_as_lost() -> None:
    shape = LayersShape(1 << 14, 3, 1 << 12, HIDDEN, torch.float32)
    owner, _helper = mailbox(0.05, shape=shape, is_wired=True)
    with pytest.raises(HelperLost):
        owner.take(ask(owner, [shape.num_tokens], [shape.num_tokens], 1.0))


@pytest.mark.parametrize(
    ("counter", "offset", "num_bytes"),
    [
        (0, 0, 8),
        (0, COUNTERS_BYTES - 1, 1),
        (0, SHAPE.size_bytes, 1),
        (0, COUNTERS_BYTES, SHAPE.size_bytes),
        (0, SHAPE.size_bytes + 1, 0),
        (0, COUNTERS_BYTES, (1 << 64) - COUNTERS_BYTES),
        (5, COUNTERS_BYTES, 0),
    ],
)
def test_a_frame_that_does_not_fit_ends_the_exchange(counter: int, offset: int, num_bytes: int) -> None:
    near, far = socket.socketpair()
    memory = torch.zeros(SHAPE.size_bytes, dtype=torch.uint8)
    helper = LayersHelper(library_of(SUPPORTED[0]), memory, SHAPE, Wire(far, None))
    with near:
        near.sendall(struct.pack("=IIQQ", counter, 1, offset, num_bytes))
        assert helper.await_pass() is None
    assert helper.is_closed
    assert not memory[COUNTERS_BYTES:].any()


def test_a_long_pass_is_taken_between_the_layers_that_the_helper_computes() -> None:
    shape = LayersShape(1 << 14, 3, 1 << 12, HIDDEN, torch.float32)
    owner, helper = mailbox(shape=shape, is_wired=True)
    all_asked = threading.Event()

    def host() -> None:
        assert helper.await_pass() is not None
        end_s = time.monotonic() + DEADLINE_S
        while not all_asked.wait(0.01) and time.monotonic() < end_s:  # a layer takes a while
            helper._code.layer_computed(helper._address)
        helper.answer()
        assert helper.await_pass() is not None
        helper.answer()

    thread = threading.Thread(target=host)
    thread.start()
    num_tokens = shape.num_tokens  # 1 MiB, more than both sockets hold
    asked = [ask(owner, [num_tokens], [num_tokens], 3.0) for _ in range(NUM_SLOTS)]
    assert helper._num_passes == 1, "the second pass has been sent before the first was answered"
    all_asked.set()
    for number in asked:
        assert torch.equal(owner.take(number), torch.full((num_tokens, HIDDEN), 3.0))
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
