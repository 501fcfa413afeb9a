"""Which instances hold the leading blocks of a prompt, and in which tier: the Conductor's view of all pools.

Fed with the KV events of every pool. Keys are chained, so a prompt's blocks are looked up once for all
instances, and the set of holders can only shrink from block to block (Mooncake, section 6.1, Algorithm 1:
`prefix_len`). Late or wrong events cost a hit, nothing else: who is asked for a block looks again.

Owns: keys and their holders, the slots of the instances. Does not know: where events come from, placement.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from conductor.block_table import new_block_table
from conductor.holders import EMPTY, HolderSets, Shard
from mooncake.blocks import KEY_BYTES, BlockKey
from mooncake.messages import KVCleared, KVEvent, KVRemoved, KVStored, Tier


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prompt each instance holds. Both arrays are int32, one element a slot; 0 for a free slot.

    `0 <= num_dram_blocks <= num_blocks`. Not to be written to: they may be one array.
    """

    num_blocks: NDArray[np.int32]
    """leading blocks of the prompt that the instance holds, in any tier"""
    num_dram_blocks: NDArray[np.int32]
    """how many of these are in its DRAM; the others have to be read from SSD"""


class PrefixIndex:
    """All blocks of all instances. Slots are small numbers that arrays by instance are indexed with."""

    def __init__(self) -> None:
        self._table = new_block_table()
        """the number of each key's set of holders"""
        self._slots: dict[str, int] = {}
        self._shards: dict[str, Shard] = {}
        self._shards_of: dict[str, tuple[str, ...]] = {}
        self._free_slots: list[int] = []
        self._free_numbers: list[int] = []
        self._num_shards = 0
        """that bits have been given to, at the same time"""
        self._sets = HolderSets()

    # -- instances ----------------------------------------------------------------------------------

    @property
    def slots(self) -> Mapping[str, int]:
        """Of each instance by its name."""
        return MappingProxyType(self._slots)

    @property
    def num_slots(self) -> int:
        """Length of the arrays by slot."""
        return len(self._slots) + len(self._free_slots)

    @property
    def num_blocks(self) -> int:
        """Different blocks that are held somewhere."""
        return len(self._table) - self.num_stale_blocks

    @property
    def num_stale_blocks(self) -> int:
        """Keys that nobody holds since instances have gone; they are dropped bit by bit while events come."""
        return self._sets.num_unheld_blocks

    def num_held(self, name: str) -> Mapping[Tier, int]:
        """Blocks by tier of the instance, or part of one, that publishes as `name`."""
        return MappingProxyType(self._shards[name].num_blocks)

    def add_instance(self, name: str, shards: Sequence[str] = ()) -> int:
        """Its slot. `shards` are the names that its parts publish events under, by default its own.

        Raises ValueError if one of the names is taken.
        """
        names = tuple(shards) or (name,)
        if name in self._slots or len({*names, *self._shards}) < len(names) + len(self._shards):
            raise ValueError(f"cannot add instance {name} with parts {', '.join(names)}: a name is taken")
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        numbers = [self._new_number() for _ in names]
        instance_bits = sum(1 << 2 * number for number in numbers)
        for shard_name, number in zip(names, numbers, strict=True):
            self._shards[shard_name] = Shard(slot, number, instance_bits)
        self._slots[name], self._shards_of[name] = slot, names
        return slot

    def remove_instance(self, name: str) -> None:
        """Forgets it and all its blocks; its slot may be given to another one. Raises KeyError."""
        for shard_name in self._shards_of.pop(name):
            shard = self._shards.pop(shard_name)
            self._sets.clear(shard)
            self._free_numbers.append(shard.number)
        self._free_slots.append(self._slots.pop(name))

    def _new_number(self) -> int:
        if self._free_numbers:
            return self._free_numbers.pop()
        self._num_shards += 1
        return self._num_shards - 1

    # -- events -------------------------------------------------------------------------------------

    def apply(self, name: str, events: Sequence[KVEvent]) -> None:
        """What happened in the pool of `name`, an instance or a part of one, oldest first.

        Events of a pool that is not known (any more), and keys that are none, are ignored.
        """
        shard = self._shards.get(name)
        if shard is None:
            return
        for event in events:
            match event:
                case KVStored(tier, keys):
                    self._change(shard, tier, keys, is_stored=True)
                case KVRemoved(tier, keys):
                    self._change(shard, tier, keys, is_stored=False)
                case KVCleared():
                    self._sets.clear(shard)
        if self._sets.has_empty:
            self._sets.release(self._table.sweep(self._sets.is_empty))

    def _change(self, shard: Shard, tier: Tier, keys: Sequence[BlockKey], is_stored: bool) -> None:
        distinct = list({key: None for key in keys if len(key) == KEY_BYTES})
        before = self._table.find(distinct)
        after = {
            number: self._sets.move(number, shard, tier, is_stored, num_blocks)
            for number, num_blocks in Counter(before).items()
        }
        if any(number != other for number, other in after.items()):
            self._table.set(distinct, [after[number] for number in before])

    # -- prompts ------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> PrefixMatch:
        """How many leading blocks of a prompt with these `keys` each instance holds: one pass for all."""
        holding, in_dram = self._sets.holding, self._sets.in_dram
        masks: list[int] = []
        ssd_masks: list[int] = []
        starts: list[int] = []
        previous, mask, end = EMPTY, -1, len(keys)
        for position, number in enumerate(self._table.find(keys)):
            if number == previous and number != EMPTY:
                continue
            previous = number
            mask &= holding[number]
            if not mask:
                end = position
                break
            masks.append(mask)
            ssd_masks.append(mask ^ (mask & in_dram[number]))
            starts.append(position)
        lengths = np.array([stop - start for start, stop in pairwise([*starts, end])], np.float32)
        num_blocks = self._by_slot(masks, lengths)
        if not any(ssd_masks):
            return PrefixMatch(num_blocks, num_blocks)
        return PrefixMatch(num_blocks, num_blocks - self._by_slot(ssd_masks, lengths))

    def _by_slot(self, masks: Sequence[int], lengths: NDArray[np.float32]) -> NDArray[np.int32]:
        """The sum of the `lengths` whose mask has the slot's bit. float32 is exact for a prompt's blocks."""
        if not masks:
            return np.zeros(self.num_slots, np.int32)
        num_bytes = -(-self.num_slots // 8)
        rows = np.frombuffer(b"".join([mask.to_bytes(num_bytes, "little") for mask in masks]), np.uint8)
        bits = np.unpackbits(
            rows.reshape(len(masks), num_bytes), axis=1, count=self.num_slots, bitorder="little"
        )
        return (lengths @ bits.astype(np.float32)).astype(np.int32)
