"""The prefix index: which instances hold the leading blocks of a prompt, and in which tier.

The index follows the KV events of every pool. A prompt's blocks are looked up once for all instances. Keys
are chained, so the set of instances that hold all blocks so far can only shrink from block to block
(Mooncake, section 6.1, Algorithm 1: `prefix_len`). A late or wrong event costs a hit, and nothing else: an
instance that is asked for a block looks for the block itself.

Owns: keys and their holders, the slots of the instances. Does not know: where events come from, placement.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conductor.index.block_table import new_block_table
from conductor.index.holders import NUM_BITS, HolderSets, Shard
from mooncake.messages.blocks import KEY_BYTES, BlockKey
from mooncake.messages.kv_events import KVCleared, KVEvent, KVRemoved, KVStored
from mooncake.messages.pools import Tier


class PrefixMatch(NamedTuple):
    """The number of leading blocks of a prompt that each instance holds, as depths with masks of slots.

    With the depths `[0, 4]` and the masks `[0b100, 0b011]`, the instances in slots 0 and 1 hold four leading
    blocks, and the instance in slot 2 holds none.

    For each slot `0 <= num_dram_blocks <= num_blocks <= num_best_blocks`; a free slot has 0 blocks.
    """

    num_slots: int
    depths: list[int]
    """The numbers of leading blocks that instances hold, in any tier: each number once, in rising order."""
    masks: list[int]
    """The mask of the slots that hold exactly this number of leading blocks, for each depth.

    Each slot is in one mask.
    """
    on_ssd: list[tuple[int, int]]
    """Runs of leading blocks: the length of each run, and the mask of the slots that hold it on SSD only."""

    def rows_of(self, masks: Sequence[int]) -> NDArray[np.bool_]:
        """Return the masks as a bool matrix `[len(masks), num_slots]`."""
        rows = np.frombuffer(packed(masks, self.num_slots), np.uint8).reshape(
            len(masks), -(-self.num_slots // 8)
        )
        return np.unpackbits(rows, axis=1, count=self.num_slots, bitorder="little").view(np.bool_)

    def with_coming(self, coming: Sequence[tuple[int, int]]) -> "PrefixMatch":
        """Return the match as it will be when the coming blocks have been stored.

        Args:
            coming: Numbers of leading blocks, each with the mask of the slots that will hold at least so
                many.

        Returns:
            The new match, or this object itself if no slot gains a block.
        """
        held = list(zip(self.depths, self.masks, strict=True))
        gaining = 0
        for depth, mask in coming:
            for less, slots in held:
                if less < depth:
                    gaining |= mask & slots
        if not gaining:
            return self
        depths, masks, left = list[int](), list[int](), (1 << self.num_slots) - 1
        for depth, mask in sorted([*held, *coming], reverse=True):
            if not mask & left:
                continue  # these slots will hold more
            if depths and depths[-1] == depth:
                masks[-1] |= mask & left
            else:
                depths.append(depth)
                masks.append(mask & left)
            left &= ~mask
        return PrefixMatch(self.num_slots, depths[::-1], masks[::-1], self.on_ssd)

    def num_blocks_at(self, slot: int) -> int:
        """Return the number of the prompt's leading blocks that the instance in `slot` holds."""
        return next(depth for depth, mask in zip(self.depths, self.masks, strict=True) if mask >> slot & 1)

    def num_ssd_blocks_at(self, slot: int) -> int:
        """Return the number of the prompt's leading blocks that the instance in `slot` must read from SSD."""
        return sum(num_blocks for num_blocks, mask in self.on_ssd if mask >> slot & 1)

    @property
    def num_blocks(self) -> NDArray[np.int32]:
        """The number of leading blocks that each instance holds in any tier, as int32 `[num_slots]`."""
        return self._sums(self.depths, self.masks)

    @property
    def num_ssd_blocks(self) -> NDArray[np.int32]:
        """The number of leading blocks that each instance must read from SSD, as int32 `[num_slots]`."""
        return self._sums([number for number, _ in self.on_ssd], [mask for _, mask in self.on_ssd])

    @property
    def num_dram_blocks(self) -> NDArray[np.int32]:
        """The number of leading blocks that each instance has without SSD reads, as int32 `[num_slots]`."""
        return self.num_blocks - self.num_ssd_blocks

    @property
    def num_best_blocks(self) -> int:
        """The number of blocks of the longest prefix that any instance holds."""
        return self.depths[-1]

    def _sums(self, numbers: Sequence[int], masks: Sequence[int]) -> NDArray[np.int32]:
        """Return for each slot the sum of the numbers whose masks contain it, as int32 `[num_slots]`."""
        sums: NDArray[np.int32] = np.array(numbers, np.int32).dot(self.rows_of(masks))
        return sums


def packed(masks: Sequence[int], num_slots: int) -> bytes:
    """Return masks as rows of whole bytes. Slot 0 is the lowest bit of a row's first byte."""
    num_bytes = -(-num_slots // 8)
    return b"".join([mask.to_bytes(num_bytes, "little") for mask in masks])


class PrefixIndex:
    """All blocks of all instances. A slot is the small number that stands for an instance in arrays."""

    def __init__(self) -> None:
        self._table = new_block_table()
        """The number of each key's set of holders."""
        self._slots: dict[str, int] = {}
        self._shards: dict[str, Shard] = {}
        self._shards_of: dict[str, tuple[str, ...]] = {}
        self._free_slots: list[int] = []
        self._free_numbers: list[int] = []
        self._num_shards = 0
        """The largest number of shards that were ever registered at the same time."""
        self._sets = HolderSets()

    # -- instances ----------------------------------------------------------------------------------

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each instance by its name."""
        return MappingProxyType(self._slots)

    @property
    def num_slots(self) -> int:
        """The number of slots, and so the length of arrays by slot."""
        return len(self._slots) + len(self._free_slots)

    @property
    def num_blocks(self) -> int:
        """The number of different blocks that at least one instance holds."""
        return len(self._table) - self.num_stale_blocks

    @property
    def num_stale_blocks(self) -> int:
        """The number of keys without a holder that are still in the table. Each call of `apply` drops some.

        Such keys remain when an instance is removed or a pool is cleared.
        """
        return self._sets.num_unheld_blocks

    def num_held(self, name: str) -> Mapping[Tier, int]:
        """Return the number of blocks, by tier, of the shard that publishes as `name`.

        Raises KeyError for an unknown name.
        """
        return MappingProxyType(self._shards[name].num_blocks)

    def add_instance(self, name: str, shards: Sequence[str] = ()) -> int:
        """Add an instance.

        Args:
            name: The name of the instance.
            shards: The names under which its shards publish events; by default the instance's name.

        Returns:
            The slot of the instance.

        Raises:
            ValueError: One of the names is taken.
        """
        names = tuple(shards) or (name,)
        if name in self._slots or len({*names, *self._shards}) < len(names) + len(self._shards):
            raise ValueError(f"cannot add instance {name} with shards {', '.join(names)}: a name is taken")
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        numbers = [self._new_number() for _ in names]
        instance_bits = sum(1 << NUM_BITS * number for number in numbers)
        for shard_name, number in zip(names, numbers, strict=True):
            self._shards[shard_name] = Shard(slot, number, instance_bits)
        self._slots[name], self._shards_of[name] = slot, names
        return slot

    def remove_instance(self, name: str) -> None:
        """Remove an instance and all its blocks. Its slot may be reused.

        Raises KeyError for an unknown name.
        """
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
        """Apply the events of the pool that publishes as `name`, oldest first.

        Events of unknown pools are ignored, and so are malformed keys.
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
        """Return how many of a prompt's leading blocks each instance holds in its pool."""
        return self._match(keys, 0)

    def match_own(self, keys: Sequence[BlockKey], held: PrefixMatch) -> PrefixMatch:
        """Return how many of a prompt's leading blocks each instance need not compute.

        These are the blocks in its pool, or those in its engine's prefix cache if they are more.

        Args:
            keys: The prompt's block keys.
            held: The result of `match` for these keys.

        Returns:
            The match. It is `held` itself while no engine reports a prefix cache.
        """
        return self._match(keys, (1 << self.num_slots) - 1) if self._sets.num_device_blocks else held

    def _match(self, keys: Sequence[BlockKey], cached: int) -> PrefixMatch:
        """Return the match of a prompt with the pools, and with the prefix caches of some engines.

        `cached` is the mask of the slots whose engines' prefix caches count.
        """
        holding, in_dram, on_device = self._sets.holding, self._sets.in_dram, self._sets.on_device
        num_slots, start = self.num_slots, 0
        pooled = mask = (1 << num_slots) - 1
        depths, masks = [0], [mask]
        on_ssd: list[tuple[int, int]] = []
        for number, end in zip(*self._table.runs(keys), strict=True):
            pooled &= holding[number]
            cached &= on_device[number]
            before, mask = mask, pooled | cached
            if not mask:
                break
            if mask == before:
                depths[-1] = end
            else:
                masks[-1] ^= mask
                masks.append(mask)
                depths.append(end)
            if ssd_mask := pooled & ~in_dram[number] & ~cached:
                on_ssd.append((end - start, ssd_mask))
            start = end
        return PrefixMatch(num_slots, depths, masks, on_ssd)
