"""Prompts with a common prefix at one instance.

An earlier prompt computes and stores the prefix, and the later ones wait for it.

Owns: the rule which prompt waits (`workers.prefill.queue` applies it to its prompts), and turns for the
prompts of decode instances, which have no such queue. Does not know: who stores blocks, pages.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.messages.blocks import BlockKey
from mooncake.messages.requests import Ref

_WORTH_WAITING_TOKENS = 128
"""The least number of shared tokens for which a prompt waits.

A prompt that waits may need an extra pass, which costs as much as computing fewer tokens again.
"""


def num_blocks_worth_waiting(block_size: int) -> int:
    """Return the least number of shared blocks that a prompt waits for."""
    return -(-_WORTH_WAITING_TOKENS // block_size)


def computes_for(
    keys: Sequence[BlockKey], num_held: int, others: Sequence[BlockKey], num_blocks: int
) -> bool:
    """Return whether one prompt computes at least `num_blocks` blocks that another prompt needs too.

    Args:
        keys: The block keys of the prompt that computes.
        num_held: The number of leading blocks that this prompt found in the pool.
        others: The block keys of the prompt that may wait.
        num_blocks: The least number of blocks.
    """
    last = num_held + num_blocks - 1
    return last < len(keys) and last < len(others) and keys[last] == others[last]  # keys are chained


@dataclass(slots=True)
class _Computing:
    """A prompt that waits or is being computed."""

    rank: tuple[float, int]
    keys: Sequence[BlockKey]
    num_held: int = 0
    """Leading blocks found in the pool and not computed; 0 until the prompt has its pool pages."""


class PrefixTurns:
    """The turns of prompts with a common prefix at a decode instance.

    A later prompt begins when an earlier one has stored the prefix. A prompt waits only for prompts of lower
    rank, and ranks never change, so there is no deadlock.
    """

    def __init__(self, block_size: int) -> None:
        self._num_blocks = num_blocks_worth_waiting(block_size)
        self._computing: dict[Ref, _Computing] = {}
        """Prompts from their arrival until their blocks are stored."""
        self._changed = asyncio.Event()

    async def wait(self, ref: Ref, rank: tuple[float, int], keys: Sequence[BlockKey]) -> None:
        """Add a prompt, and wait until no earlier one computes blocks that the prompt can reuse."""
        prompt = self._computing[ref] = _Computing(rank, keys)
        while any(self._must_wait(prompt, other) for other in self._computing.values()):
            await self._changed.wait()

    def reserved(self, ref: Ref, num_held: int) -> None:
        """Record that a prompt has its pool pages, and the number of leading blocks that the pool held."""
        self._computing[ref].num_held = num_held
        self._wake()

    def stored(self, ref: Ref) -> None:
        """Remove a prompt whose blocks have been stored, or will not be stored. Idempotent."""
        if self._computing.pop(ref, None) is not None:
            self._wake()

    def _must_wait(self, prompt: _Computing, other: _Computing) -> bool:
        return other.rank < prompt.rank and computes_for(
            other.keys, other.num_held, prompt.keys, self._num_blocks
        )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
