"""Helpers on idle cores: results are right whoever computes them, and nobody waits for a helper in vain."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.cpu.linear import PackedLinear
from tests.kernels.cpu.isas import SUPPORTED, library_of, random

NUM_CALLS = 300
LIBRARY = library_of(SUPPORTED[0])


@pytest.fixture
def linear() -> Iterator[PackedLinear]:
    """A product of 20 panels, with three helpers."""
    LIBRARY.set_num_threads(4)
    yield PackedLinear(LIBRARY, random((960, 64), torch.bfloat16))
    LIBRARY.set_num_threads(1)


def are_right(linear: PackedLinear) -> bool:
    """Many products, of few and of many rows (a panel is divided then), beside those of one thread."""
    x = random((300, 64), torch.bfloat16, 1)
    LIBRARY.set_num_threads(1)
    expected = {num_rows: linear(x[:num_rows]) for num_rows in (1, 9, 300)}
    LIBRARY.set_num_threads(4)
    return all(
        torch.equal(linear(x[:num_rows]), result)
        for _ in range(NUM_CALLS)
        for num_rows, result in expected.items()
    )


def test_every_piece_is_computed_once(linear: PackedLinear) -> None:
    assert are_right(linear)


def test_threads_that_compute_at_the_same_time_do_not_disturb_one_another(linear: PackedLinear) -> None:
    x = [random((9, 64), torch.bfloat16, seed) for seed in range(4)]
    expected = [linear(rows) for rows in x]

    def compute(index: int) -> bool:
        return all(torch.equal(linear(x[index]), expected[index]) for _ in range(NUM_CALLS))

    with ThreadPoolExecutor(len(x)) as threads:
        assert all(threads.map(compute, range(len(x))))


def test_a_guest_beside_the_thread_that_computes_moves_no_helpers(linear: PackedLinear) -> None:
    cores = sorted(os.sched_getaffinity(0))
    x = random((9, 64), torch.bfloat16, 1)

    def compute_on(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of the calling thread
        linear(x)

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1, initializer=LIBRARY.be_guest) as guest:
        first.submit(compute_on, cores[0]).result()
        before = LIBRARY.num_placements
        for _ in range(NUM_CALLS):
            guest.submit(compute_on, cores[-1]).result()
            first.submit(compute_on, cores[0]).result()
        # A caller that has waited too long for a piece moves them, too.
        assert LIBRARY.num_placements - before < NUM_CALLS
        assert torch.equal(guest.submit(linear, x).result(), linear(x))


def test_on_one_core_the_caller_and_its_helpers_get_on(linear: PackedLinear) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert are_right(linear)
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_computes_without_helpers(linear: PackedLinear) -> None:
    x = random((9, 64), torch.bfloat16, 1)
    expected = linear(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
