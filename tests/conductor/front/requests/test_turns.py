"""The order in which short bodies are read: some at a time, and tenants in turn."""

import asyncio

from conductor.front.requests.turns import MAX_BYTES_AT_ONCE, ReadingOrder

HALF = MAX_BYTES_AT_ONCE // 2


class Reader:
    """Reads bodies of tenants, and notes them by turn of the event loop."""

    def __init__(self) -> None:
        self._order = ReadingOrder()
        self._turns: list[list[str]] = []

    async def read(self, tenant: str, num_bytes: int) -> None:
        await self._order.turn(tenant, num_bytes)
        self._turns[-1].append(tenant)

    async def turns_of(self, *bodies: tuple[str, int]) -> list[str]:
        """The tenants whose bodies each turn has read, all of which have come at once."""
        tasks = [asyncio.create_task(self.read(*body)) for body in bodies]
        while not all(task.done() for task in tasks):
            self._turns.append([])
            await asyncio.sleep(0)
        return ["".join(turn) for turn in self._turns if turn]


async def test_small_bodies_are_read_at_once() -> None:
    assert await Reader().turns_of(*[("a", HALF // 8)] * 16) == ["a" * 16]


async def test_a_turn_of_the_event_loop_reads_no_more_than_one_long_body() -> None:
    turns = await Reader().turns_of(("a", HALF), ("a", 2 * HALF), ("a", 3 * HALF), ("a", HALF), ("a", HALF))
    assert turns == ["a", "a", "a", "aa"]


async def test_tenants_take_turns() -> None:
    many = [("a", 2 * HALF)] * 10
    assert (
        "".join(await Reader().turns_of(*many, ("b", HALF), ("b", HALF), ("c", HALF))) == "aabcab" + "a" * 7
    )


async def test_a_body_whose_client_has_gone_holds_up_none() -> None:
    reader = ReadingOrder()
    await reader.turn("a", MAX_BYTES_AT_ONCE)
    gone = asyncio.create_task(reader.turn("a", MAX_BYTES_AT_ONCE))
    await asyncio.sleep(0)
    behind = asyncio.create_task(reader.turn("a", MAX_BYTES_AT_ONCE))
    gone.cancel()
    await behind
