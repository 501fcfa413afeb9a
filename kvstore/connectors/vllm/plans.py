"""The messages from the scheduler's side to the worker's side for one step.

Owns: these messages. Does not know: how a plan is made or carried out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mooncake.messages.blocks import BlockKey


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block of the pool, and the engine's pages that have its tokens.

    If pages are larger than blocks, there is one page, and the block is part number `part` of this page. Else
    `part` is 0, and there may be several pages. None stands for a page that is not to be loaded.
    """

    key: BlockKey
    pages: tuple[int | None, ...]
    part: int = 0


def pages_of(blocks: Iterable[PlacedBlock]) -> set[int]:
    """Return the set of pages of the blocks."""
    return {page for block in blocks for page in block.pages if page is not None}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Blocks of the pool to load for a request, which waits for them."""

    request_id: str
    blocks: list[PlacedBlock]

    @property
    def pages(self) -> set[int]:
        return pages_of(self.blocks)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The blocks that a request completes in a step, in the order of its tokens."""

    request_id: str
    blocks: list[PlacedBlock]


@dataclass(slots=True)
class StepPlan:
    """The plan of one step: blocks to load, blocks to store, preempted and finished requests.

    The loads begin with the step. The stores are of blocks that the step completes.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[StorePlan] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    """Preempted requests, whose pages this step may give to other requests."""
    finished: dict[str, int] = field(default_factory=dict)
    """Requests that have finished since the last step, with their numbers of pages.

    Each request keeps its pages until the worker's side reports that its stores have ended.
    """
    needs_pages: bool = False
    """Whether the engine waits for pages of finished requests."""


def place_blocks(
    keys: list[BlockKey],
    tokens: range,
    pages: list[int],
    *,
    block_size: int,
    page_tokens: int,
) -> list[PlacedBlock]:
    """Return the blocks that `tokens` of a request touch, with their pages.

    Args:
        keys: The keys of the request's leading blocks.
        tokens: The tokens to place: whole blocks, or whole pages. A placed block has None in place of a page
            with tokens outside this range.
        pages: The engine's pages of the request, from its first token on.
        block_size: The tokens of a block of the pool.
        page_tokens: The tokens of a page. One of `block_size` and `page_tokens` is a multiple of the
            other.
    """
    numbers = range(tokens.start // block_size, -(-tokens.stop // block_size))
    if block_size <= page_tokens:
        num_parts = page_tokens // block_size
        return [
            PlacedBlock(keys[number], (pages[number // num_parts],), number % num_parts) for number in numbers
        ]
    num_pages = block_size // page_tokens
    wanted = range(tokens.start // page_tokens, tokens.stop // page_tokens)
    return [
        PlacedBlock(
            keys[number],
            tuple(
                pages[page] if page in wanted else None
                for page in range(number * num_pages, (number + 1) * num_pages)
            ),
        )
        for number in numbers
    ]
