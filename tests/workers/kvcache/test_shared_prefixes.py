"""Turns of prompts with a common prefix, as inlined prompts take them."""

import asyncio

from mooncake.messages.blocks import BlockKey
from mooncake.messages.requests import Ref
from workers.kvcache.shared_prefixes import PrefixTurns

BLOCK_SIZE = 64
"""A prompt waits for two blocks."""


def keys(*blocks: int) -> list[BlockKey]:
    """Keys of a prompt whose blocks have these tokens."""
    return [bytes(blocks[: number + 1]).ljust(16) for number in range(len(blocks))]


def ref(name: str) -> Ref:
    return Ref(1, name, 1)


class Prompts:
    """Prompts that wait for their turns, by name."""

    def __init__(self) -> None:
        self.turns = PrefixTurns(BLOCK_SIZE)
        self.waiting: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, block_keys: list[BlockKey], rank: float = 0.0) -> None:
        place = (rank, len(self.waiting))
        self.waiting[name] = asyncio.create_task(self.turns.wait(ref(name), place, block_keys))

    async def with_turn(self) -> list[str]:
        for _ in range(5):  # as many steps as anything here takes
            await asyncio.sleep(0)
        return [name for name, waiting in self.waiting.items() if waiting.done()]


async def test_later_prompts_wait_until_the_first_one_is_stored_and_then_for_one_anothers_pages() -> None:
    prompts = Prompts()
    for name in "abc":
        await prompts.come(name, keys(1, 2, 3, ord(name)))
    assert await prompts.with_turn() == ["a"]
    prompts.turns.reserved(ref("a"), 0)
    assert await prompts.with_turn() == ["a"]
    prompts.turns.stored(ref("a"))
    assert await prompts.with_turn() == ["a", "b"]
    prompts.turns.reserved(ref("b"), 3)  # it computes only what no other begins with
    assert await prompts.with_turn() == ["a", "b", "c"]


async def test_prompts_that_share_less_than_a_pass_costs_do_not_wait() -> None:
    prompts = Prompts()
    await prompts.come("a", keys(1, 2))
    await prompts.come("b", keys(1, 3))
    assert await prompts.with_turn() == ["a", "b"]


async def test_prompt_of_a_lower_rank_does_not_wait() -> None:
    prompts = Prompts()
    await prompts.come("a", keys(1, 2))
    await prompts.come("urgent", keys(1, 2), rank=-60.0)
    assert await prompts.with_turn() == ["a", "urgent"]


async def test_nobody_waits_for_a_prompt_that_has_been_aborted_while_it_waited() -> None:
    prompts = Prompts()
    for name in "abc":
        await prompts.come(name, keys(1, 2, 3))
    assert await prompts.with_turn() == ["a"]
    prompts.waiting.pop("b").cancel()
    prompts.turns.stored(ref("b"))
    prompts.turns.stored(ref("a"))
    prompts.turns.stored(ref("a"))
    assert await prompts.with_turn() == ["a", "c"]
