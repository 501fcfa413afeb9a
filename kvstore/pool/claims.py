"""Claims of users on a pool: reservations (pages of found blocks, pages to write) and leases (pages to read).

Owns: the data of claims. Does not know: pages' states, who the users are.
"""

from dataclasses import dataclass, field

from kvstore.events.batches import BlockTokens
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier

NOBODY = 0
"""The owner of claims without a session: of promotions, and of reads by other messengers."""


@dataclass(slots=True)
class Block:
    """One block of a reservation.

    Invariants: a block that was ever SEALED in its page has all layers. A block is SEALED when its last layer
    arrives, unless the block is private, or a block with its key is sealed in another page then.
    """

    key: BlockKey | None
    page: int
    generation: int
    found: bool
    """Whether the block was already sealed when it was reserved."""
    arrived: int
    """A mask of the layers that have arrived: bit l for layer l."""
    position: int
    """The index of the block in its reservation. A promoted block has the index that the lower tier has kept.

    If the reservation begins with the prompt's first block, this is the index in the prompt. Otherwise it is
    smaller than the index in the prompt: pool clients store long prompts in parts, and some engines store
    only the blocks after a stored prefix.
    """
    tokens: BlockTokens | None = None
    tier: Tier | None = None
    """The tier in which the block was found; None if the block was not found.

    The tier is SSD if the block was promoted and no request has asked for it since, else DRAM.
    """


@dataclass(slots=True)
class PageReservation:
    """The pages of a request: one for each of its keys, in order, then private pages."""

    reservation_id: int
    owner: int
    blocks: list[Block]
    by_page: dict[int, Block] = field(init=False)

    def __post_init__(self) -> None:
        self.by_page = {block.page: block for block in self.blocks}


def layer_mask(layers: range) -> int:
    """Return a mask with the bits `[layers.start, layers.stop)`, as in `Block.arrived`."""
    return (1 << layers.stop) - (1 << layers.start)


@dataclass(frozen=True, slots=True)
class PageLease:
    """A claim on pages that are read. `pages` has None for keys that were not found."""

    lease_id: int
    owner: int
    pages: list[int | None]
    deadline_s: float

    @property
    def claimed_pages(self) -> list[int]:
        """The leased pages, each once, as a key may have been named twice."""
        return list(dict.fromkeys(page for page in self.pages if page is not None))
