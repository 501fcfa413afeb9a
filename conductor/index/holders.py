"""Sets of holders: the shards that have a block, by tier. Blocks with the same holders share one set.

A set has a small number. So a block costs its key and this number, however many instances there are. A set is
a bit mask with three bits for each shard: DRAM, SSD, and the engine's own prefix cache. An instance of
several shards (pipeline stages, ranks) holds a block only if all its shards do.

Owns: sets, their numbers, how many blocks use each. Does not know: keys.
"""

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from mooncake.messages.pools import Tier

EMPTY = 0
"""The set of a block without holders."""
_BITS = {Tier.DRAM: 0b001, Tier.SSD: 0b010, Tier.DEVICE: 0b100}
NUM_BITS = len(_BITS)
"""Bits of one shard in a set."""


@dataclass(slots=True, eq=False)
class Shard:
    """A shard of an instance: the blocks in one messenger's pool.

    The shard has the bits `NUM_BITS * number` (DRAM) and the next two (SSD, device) of each set.
    """

    slot: int
    """The slot of the shard's instance."""
    number: int
    instance_bits: int
    """The DRAM bits of all shards of the instance."""
    num_blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))

    def bit(self, tier: Tier) -> int:
        """Return the bit of this shard and tier in a set."""
        return _BITS[tier] << NUM_BITS * self.number


class HolderSets:
    """All sets of holders, by number. A set lives as long as blocks use it."""

    def __init__(self) -> None:
        self.holding = [0]
        """The mask of the slots whose instances hold the set's blocks in DRAM or on SSD, by set."""
        self.in_dram = [0]
        """The mask of the slots whose instances hold the set's blocks in DRAM, by set."""
        self.on_device = [0]
        """The mask of the slots whose engines hold the set's blocks in their own prefix caches, by set."""
        self.num_device_blocks = 0
        """The number of blocks in engines' prefix caches. A block counts once for each shard that has it."""
        self._held = [0]
        self._num_blocks = [0]
        self._numbers = {0: EMPTY}
        """The number of each set by its bit mask. If `clear` made sets equal, only one of them is here."""
        self._free: list[int] = []
        self._num_empty = 0
        self.is_empty = array("B", [False])
        """Whether a set has lost all holders while blocks still use it, by set. False for `EMPTY`."""

    def move(self, before: int, shard: Shard, tier: Tier, is_stored: bool, num_blocks: int) -> int:
        """Record that `shard` has stored or removed `num_blocks` blocks in `tier`.

        `before` is the number of the set that these blocks have used. Returns the number of the set that they
        use now.
        """
        held, bit = self._held[before], shard.bit(tier)
        if bool(held & bit) is is_stored:
            return before
        held ^= bit
        after = self._numbers.get(held)
        if after is None:
            after = self._new(held, before, shard)
        change = num_blocks if is_stored else -num_blocks
        shard.num_blocks[tier] += change
        if tier is Tier.DEVICE:
            self.num_device_blocks += change
        if after != EMPTY:
            self._num_blocks[after] += num_blocks
        if before != EMPTY:
            self._release(before, num_blocks)
        return after

    def clear(self, shard: Shard) -> None:
        """Remove a shard from all sets. The cost grows with the number of sets, not of blocks."""
        if not any(shard.num_blocks.values()):
            return
        self.num_device_blocks -= shard.num_blocks[Tier.DEVICE]
        shard.num_blocks = dict.fromkeys(Tier, 0)
        bits = sum(map(shard.bit, Tier))
        slot_bit = 1 << shard.slot
        for number, held in enumerate(self._held):
            if held & bits:
                self._forget_mask(number)
                held &= ~bits
                self._held[number] = held
                self.holding[number] &= ~slot_bit
                self.in_dram[number] &= ~slot_bit
                self.on_device[number] &= ~slot_bit
                if held:
                    self._numbers.setdefault(held, number)
                else:
                    self.is_empty[number] = True
                    self._num_empty += 1

    @property
    def has_empty(self) -> bool:
        """Whether blocks still use a set that has lost all holders."""
        return self._num_empty > 0

    @property
    def num_unheld_blocks(self) -> int:
        """The number of blocks whose set has lost all holders."""
        return sum(itertools.compress(self._num_blocks, self.is_empty))

    def release(self, numbers: Iterable[int]) -> None:
        """Record that blocks have stopped using their sets: one block for each number in `numbers`."""
        for number, num_blocks in Counter(numbers).items():
            self._release(number, num_blocks)

    def _release(self, number: int, num_blocks: int) -> None:
        self._num_blocks[number] -= num_blocks
        if not self._num_blocks[number]:
            self._forget_mask(number)
            self._held[number] = self.holding[number] = self.in_dram[number] = self.on_device[number] = 0
            self._num_empty -= self.is_empty[number]
            self.is_empty[number] = False
            self._free.append(number)

    def _new(self, held: int, before: int, shard: Shard) -> int:
        """Make the set with the bit mask `held`, and return its number.

        The mask differs from the set `before` in one bit of `shard`.
        """
        wanted, slot_bit = shard.instance_bits, 1 << shard.slot
        in_dram, on_ssd, on_device = held, held >> 1, held >> 2

        def mask_of(masks: list[int], present: int) -> int:
            return masks[before] | slot_bit if present & wanted == wanted else masks[before] & ~slot_bit

        masks = (
            held,
            mask_of(self.holding, in_dram | on_ssd),
            mask_of(self.in_dram, in_dram),
            mask_of(self.on_device, on_device),
        )
        lists = self._held, self.holding, self.in_dram, self.on_device
        if self._free:
            number = self._free.pop()
            for values, value in zip(lists, masks, strict=True):
                values[number] = value
        else:
            number = len(self._held)
            for values, value in zip(lists, masks, strict=True):
                values.append(value)
            self._num_blocks.append(0)
            self.is_empty.append(False)
        self._numbers[held] = number
        return number

    def _forget_mask(self, number: int) -> None:
        if self._numbers.get(self._held[number]) == number:
            del self._numbers[self._held[number]]
