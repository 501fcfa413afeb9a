"""Which instances hold the leading blocks of a prompt, and in which tier: the Conductor's view of all pools.

Fed with the KV events of every pool. Keys are chained, so a prompt's blocks are looked up once for all
instances, and the set of holders can only shrink from block to block (Mooncake, section 6.1, Algorithm 1:
`prefix_len`). Late or wrong events cost a hit, nothing else: who is asked for a block looks again.

Owns: keys and their holders, the slots of the instances. Does not know: where events come from, placement.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conductor.block_table import new_block_table
from conductor.holders import HolderSets, Shard
from mooncake.blocks import KEY_BYTES, BlockKey
from mooncake.kv_events import KVCleared, KVEvent, KVRemoved, KVStored
from mooncake.pools import Tier


class PrefixMatch(NamedTuple):
    """How much of a prompt each instance holds. Two arrays are int32, one element a slot; 0 for a free slot.

    `0 <= num_dram_blocks <= num_blocks <= num_best_blocks`. Not to be written to: they may be one array.
    """

    num_blocks: NDArray[np.int32]
    """leading blocks of the prompt that the instance holds, in any tier"""
    num_dram_blocks: NDArray[np.int32]
    """how many of these are in its DRAM; the others have to be read from SSD"""
    num_best_blocks: int
    best_slots: NDArray[np.intp]
    """who holds so many: the longest prefix that anybody holds; empty if nobody holds any"""


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
        lengths: list[int] = []
        mask, end = -1, 0
        for number, run_end in zip(*self._table.runs(keys), strict=True):
            mask &= holding[number]
            if not mask:
                break
            masks.append(mask)
            ssd_masks.append(mask ^ (mask & in_dram[number]))
            lengths.append(run_end - end)
            end = run_end
        if not masks:
            none = np.zeros(self.num_slots, np.int32)
            return PrefixMatch(none, none, 0, none.nonzero()[0])
        # float32 is exact for a prompt's blocks, and quick.
        weights = np.array(lengths, np.float32)
        num_sets, is_on_ssd = len(masks), any(ssd_masks)
        bits = self._bits(masks + ssd_masks if is_on_ssd else masks)
        num_blocks = num_dram_blocks = weights.dot(bits[:num_sets]).astype(np.int32)
        if is_on_ssd:
            num_dram_blocks = num_blocks - weights.dot(bits[num_sets:]).astype(np.int32)
        return PrefixMatch(num_blocks, num_dram_blocks, end, bits[num_sets - 1].nonzero()[0])

    def _bits(self, masks: Sequence[int]) -> NDArray[np.uint8]:
        """One row a mask, one column a slot."""
        num_bytes = -(-self.num_slots // 8)
        joined = b"".join([mask.to_bytes(num_bytes, "little") for mask in masks])
        rows = np.frombuffer(joined, np.uint8).reshape(len(masks), num_bytes)
        return np.unpackbits(rows, axis=1, count=self.num_slots, bitorder="little")
