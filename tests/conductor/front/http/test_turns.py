"""Connections with many requests behind each other let others come in between."""

import asyncio

from conductor.front.http.turns import MOST_AT_ONCE, Turns


def test_a_few_go_on_in_each_turn_of_the_loop_and_in_order() -> None:
    async def count() -> list[int]:
        turns, done = Turns(), list[int]()
        for number in range(2 * MOST_AT_ONCE + 1):
            turns.wait(lambda number=number: done.append(number))  # type: ignore[misc]
        nums_done = []
        while len(done) < 2 * MOST_AT_ONCE + 1:
            await asyncio.sleep(0)
            nums_done.append(len(done))
        assert done == list(range(2 * MOST_AT_ONCE + 1))
        return nums_done

    assert asyncio.run(count()) == [MOST_AT_ONCE, 2 * MOST_AT_ONCE, 2 * MOST_AT_ONCE + 1]
