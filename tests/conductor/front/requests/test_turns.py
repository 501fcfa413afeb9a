"""The order in which short bodies are read: some at a time, and tenants in turn."""

import asyncio
from collections.abc import Callable

from conductor.front.requests.turns import MAX_BODIES_AT_ONCE, MAX_BYTES_AT_ONCE, ReadingOrder

HALF = MAX_BYTES_AT_ONCE // 2


class Reader:
    """Reads bodies of tenants, and notes them by turn of the event loop."""

    def __init__(self, must_wait: Callable[[], bool] = lambda: False) -> None:
        self._order = ReadingOrder(must_wait)
        self._turns: list[list[tuple[str, int]]] = [[]]
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, tenant: str, num_bytes: int) -> asyncio.Task[None]:
        """Begin to read a body, which has just come."""
        self._tasks.append(asyncio.create_task(self._read(tenant, num_bytes)))
        return self._tasks[-1]

    async def _read(self, tenant: str, num_bytes: int) -> None:
        await self._order.turn(tenant, num_bytes)
        self._turns[-1].append((tenant, num_bytes))

    async def next_turn(self) -> None:
        """Wait for the next turn of the event loop."""
        self._turns.append([])
        await asyncio.sleep(0)

    async def turns(self) -> list[list[tuple[str, int]]]:
        """The bodies that each turn has read, once all have been read."""
        while not all(task.done() for task in self._tasks):
            await self.next_turn()
        return [turn for turn in self._turns if turn]

    async def turns_of(self, *bodies: tuple[str, int]) -> list[str]:
        """The tenants whose bodies each turn has read, all of which have come at once."""
        for body in bodies:
            self.add(*body)
        return ["".join(tenant for tenant, _ in turn) for turn in await self.turns()]


async def test_small_bodies_are_read_some_at_once() -> None:
    turns = await Reader().turns_of(*[("a", 50)] * (2 * MAX_BODIES_AT_ONCE + 1))
    assert turns == ["a" * MAX_BODIES_AT_ONCE] * 2 + ["a"]


async def test_a_turn_of_the_event_loop_reads_no_more_than_one_long_body() -> None:
    turns = await Reader().turns_of(("a", HALF), ("a", 2 * HALF), ("a", 3 * HALF), ("a", HALF), ("a", HALF))
    assert turns == ["a", "a", "a", "aa"]


async def test_tenants_take_turns() -> None:
    many = [("a", 2 * HALF)] * 10
    assert "".join(await Reader().turns_of(*many, ("b", HALF), ("b", HALF), ("c", HALF))) == "abcab" + "a" * 8


async def test_a_turn_of_the_event_loop_reads_no_more_where_bodies_come_all_the_time() -> None:
    reader = Reader()
    for _ in range(2):
        reader.add("a", 2 * HALF)
    for _ in range(8):
        await reader.next_turn()
        reader.add("a", HALF)
    assert max(sum(num_bytes for _, num_bytes in turn) for turn in await reader.turns()) == MAX_BYTES_AT_ONCE


async def test_a_body_whose_client_has_gone_costs_its_tenant_no_turn() -> None:
    reader = Reader()
    reader.add("other", 2 * HALF)
    gone = reader.add("a", 2 * HALF)
    for tenant in "abb":
        reader.add(tenant, 2 * HALF)
    await reader.next_turn()
    gone.cancel()
    assert [tenant for [(tenant, _)] in await reader.turns()] == ["other", "a", "b", "b"]


async def test_bodies_wait_while_the_conductor_is_behind() -> None:
    is_behind = True
    reader = Reader(lambda: is_behind)
    for tenant in "aab":
        reader.add(tenant, 2 * HALF)
    for _ in range(10):
        await reader.next_turn()
    is_behind = False
    turns = await reader.turns()
    assert [tenant for [(tenant, _)] in turns] == ["a", "b", "a"]
