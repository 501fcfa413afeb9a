"""A deadline moves with what happens, and holds nobody once it is closed."""

import asyncio
import gc
import time
import weakref

from messenger.transport.deadline import Deadline


class _Owner:
    """Has the deadline that calls it."""

    def __init__(self) -> None:
        self.deadline = Deadline(60, self.give_up)

    def give_up(self) -> None:
        raise AssertionError("nothing was late")


async def test_whoever_closes_its_deadline_goes_at_once() -> None:
    owner = _Owner()
    owner.deadline.set()
    owner.deadline.close()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()


async def test_a_deadline_that_is_moved_is_missed_later() -> None:
    missed = asyncio.Event()
    deadline, loop = Deadline(0.05, missed.set), asyncio.get_running_loop()
    deadline.set()
    time.sleep(0.03)  # noqa: ASYNC251 - the loop gets no turn: nothing is missed on a slow machine either
    deadline.set()
    moved_s = loop.time()
    await missed.wait()
    assert loop.time() >= moved_s + 0.05
    deadline.close()
