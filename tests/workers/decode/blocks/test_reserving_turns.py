"""Who reserves next, without a pool."""

import asyncio

import pytest

from mooncake.messages.requests import Flow
from workers.decode.blocks.reserving_turns import ReservingTurns

A, B = Flow("a", "n=128"), Flow("b", "1")


class Pool:
    """Of 100 pages: `held` are reserved, `order` is who was let at it."""

    def __init__(self) -> None:
        self.held: list[tuple[Flow, int]] = []
        self.order: list[Flow] = []
        self.turns = ReservingTurns(100, lambda: self.held)

    async def reserve(self, flow: Flow, num_pages: int, may_end: asyncio.Event | None = None) -> None:
        async with self.turns.turn(flow, num_pages):
            self.order.append(flow)
            if may_end is not None:
                await may_end.wait()
            self.held.append((flow, num_pages))

    def release(self, flow: Flow, num_pages: int) -> None:
        self.held.remove((flow, num_pages))
        self.turns.recheck()


async def settle() -> None:
    """Let all tasks go as far as they come."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_whoever_holds_least_goes_first() -> None:
    pool, may_end = Pool(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.reserve(A, 1, may_end))
        await settle()
        for flow in (A, A, Flow("a", "2"), B):
            group.create_task(pool.reserve(flow, 1))
        await settle()
        assert pool.order == [A]
        may_end.set()
    assert pool.order == [A, B, Flow("a", "2"), A, A]


async def test_a_short_prompt_does_not_wait_for_long_ones_of_many_tenants() -> None:
    pool, may_end = Pool(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.reserve(A, 10, may_end))
        for number in range(5):
            group.create_task(pool.reserve(Flow(f"c{number}", "1"), 10))
        group.create_task(pool.reserve(B, 1))
        await settle()
        assert pool.order == [A, B]
        may_end.set()
    assert len(pool.order) == 7


async def test_the_longest_prompt_has_its_turn_although_shorter_ones_of_others_would_fit() -> None:
    pool = Pool()
    async with asyncio.TaskGroup() as group:
        group.create_task(pool.reserve(A, 60))
        await settle()
        longest, shorter = Flow("c", "longest"), Flow("d", "shorter")
        group.create_task(pool.reserve(longest, 60))
        group.create_task(pool.reserve(shorter, 20))
        await settle()
        assert pool.order == [A]
        pool.release(A, 60)
        await settle()
    assert pool.order == [A, longest, shorter]


async def test_long_prompts_of_many_tenants_leave_room_for_short_ones() -> None:
    pool = Pool()
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(pool.reserve(Flow(f"c{number}", "1"), 20))
        await settle()
        assert pool.order == [Flow(f"c{number}", "1") for number in range(4)]
        group.create_task(pool.reserve(B, 1))
        await settle()
        assert pool.order[4:] == [B]
        pool.release(Flow("c0", "1"), 20)
    assert len(pool.order) == 6


@pytest.mark.parametrize(("flow", "most"), [(A, 5), (Flow("a", ""), 7)])
async def test_pages_are_left_for_other_answers_and_tenants(flow: Flow, most: int) -> None:
    pool = Pool()
    flows = [flow if flow.answer_id else Flow("a", str(index)) for index in range(9)]
    async with asyncio.TaskGroup() as group:
        for each in flows:
            group.create_task(pool.reserve(each, 10))
        await settle()
        assert len(pool.order) == most
        group.create_task(pool.reserve(B, 10))
        await settle()
        assert len(pool.order) == most + 1
        for index in range(most, 9):
            pool.release(pool.order[0 if index < most else index - most], 10)
            await settle()
    assert len(pool.order) == 10


async def test_a_prompt_of_most_of_the_pool_has_its_turn_when_its_tenant_holds_nothing() -> None:
    pool = Pool()
    await pool.reserve(A, 10)
    large = asyncio.create_task(pool.reserve(A, 95))
    await settle()
    assert pool.order == [A]
    pool.release(A, 10)
    await large


@pytest.mark.parametrize("num_steps", range(4))
async def test_who_is_cancelled_holds_nobody_up(num_steps: int) -> None:
    pool, never = Pool(), asyncio.Event()
    cancelled = asyncio.create_task(pool.reserve(A, 1, never))
    for _ in range(num_steps):
        await asyncio.sleep(0)
    cancelled.cancel()
    await pool.reserve(B, 1)
    assert pool.held == [(B, 1)]


async def test_a_turn_ends_although_whoever_waits_has_just_been_cancelled() -> None:
    pool = Pool()
    first = asyncio.create_task(pool.reserve(A, 1, asyncio.Event()))
    cancelled = asyncio.create_task(pool.reserve(B, 1))
    await settle()
    first.cancel()  # its turn ends before the other task knows
    cancelled.cancel()
    ended = await asyncio.gather(first, cancelled, return_exceptions=True)
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 2
    await pool.reserve(A, 1)
