"""Copies of the hottest prefixes, made before requests ask for them (Mooncake, sections 3 and 6.2).

"The hottest blocks should be replicated to multiple nodes to avoid fetching congestion." Requests make copies
when they fetch prefixes. In addition, a round every few seconds looks for prefixes with enough uses for one
more copy. The instance with the shortest queue is ordered to fetch the prefix as bulk; the bytes in flight
are limited. Such a copy is dropped when its uses have fallen to half of the uses that justified it, and
another prefill instance holds the blocks. Copies that requests have made are left to eviction.

Owns: the copies that were ordered. Does not know: how blocks are sent, the clock.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.effects import Effect
from conductor.index.prefix_index import PrefixMatch
from conductor.replication.heat import Heat
from conductor.settings import ReplicationSettings
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance
from mooncake.messages.block_orders import DropCopies, Replicate
from mooncake.messages.blocks import BlockKey, KVLayout

FETCH_S = 30.0
"""Seconds that an instance has to fetch a copy."""
AGAIN_S = 120.0
"""Seconds after which a copy that did not arrive, or was evicted, can be ordered again."""
MOST_COPIES = 256
"""The most copies that are tracked. Older copies are left to eviction."""
_MOST_NOTED = 1 << 13
"""The number of latest prompts in which a round looks for hot prefixes."""
_MOST_LATEST = 1 << 10
"""The number of latest prompts in which hot prefixes are looked for when an instance joins or leaves."""
_MOST_PREFIXES = 64
"""The most prefixes that one round considers, the hottest ones."""
_ROOM_SHARE = 2
"""The number by which an instance's room is divided: the result is the most blocks of one copy."""


@dataclass(slots=True)
class PrefixCopy:
    """A prefix that `instance` was ordered to fetch."""

    instance: Instance
    keys: Sequence[BlockKey]
    num_bytes: int
    due_s: float
    """The time by which the copy must have arrived."""
    is_there: bool = False
    missed_s: float | None = None
    """The time from which the copy has been missing (it did not arrive in time, or was evicted).

    None if it is not missing.
    """

    def is_in_flight(self, now_s: float) -> bool:
        """Return whether the copy may still arrive."""
        return not self.is_there and now_s < self.due_s


class Replication:
    """Orders copies of hot prefixes, and drops cold copies."""

    def __init__(self, view: ClusterView, settings: ReplicationSettings) -> None:
        self._view, self.settings = view, settings
        self._heat = Heat()
        self._noted: deque[Sequence[BlockKey]] = deque(maxlen=_MOST_NOTED)
        """The prompts that were counted since the latest round."""
        self._latest: deque[Sequence[BlockKey]] = deque(maxlen=_MOST_LATEST)
        """The latest prompts that were counted, over all rounds."""
        self._copies: dict[tuple[str, BlockKey], PrefixCopy] = {}
        """The copies by instance and last block, oldest first."""
        self._hot: list[Sequence[BlockKey]] = []
        """The prefixes that were worth a second copy in the latest round."""
        self._known: set[bytes] = set()
        """The socket identities of the instances that compute prompts, as of the latest call of `tick`."""
        self._round_s: float | None = None
        self.num_ordered_blocks = 0
        self.num_dropped_blocks = 0

    @property
    def num_copies(self) -> int:
        """The number of copies that are believed to be at their instances."""
        return sum(copy.is_there for copy in self._copies.values())

    def note(self, keys: Sequence[BlockKey]) -> None:
        """Record a prompt with these blocks, to be counted later."""
        self._heat.note(keys)

    def tick(self, now_s: float) -> list[Effect]:
        """Count the recorded prompts, and order or drop copies if a round is due.

        In any case the hottest prefixes are ordered for instances that have just begun to compute prompts.
        """
        if self._round_s is None:
            self._round_s = now_s
        seconds = now_s - self._round_s
        layout = self._view.layout
        if layout is None:
            return []
        is_time = seconds >= self.settings.period_s
        if is_time:
            self._round_s = now_s
            self._heat.fade(seconds)
        counted = self._heat.count()
        self._noted += counted
        self._latest += counted
        warming = self._warm(layout, now_s)
        if not is_time:
            return warming
        holders = self._holders()
        self._follow(holders, now_s)
        return warming + self._drop(holders) + self._replicate(layout, now_s)

    def hottest(self, num_uses: float) -> list[Sequence[BlockKey]]:
        """Return the most used prefixes of the latest prompts, each once, at most `_MOST_PREFIXES`.

        All of them have more than `num_uses` uses.
        """
        return self._hottest([*self._latest, *self._hot], num_uses)

    # -- copies that were ordered -------------------------------------------------------------------

    def _holders(self) -> dict[BlockKey, NDArray[np.bool_]]:
        """Return which slots hold each copied prefix as a whole.

        The result is a bool array `[num_slots]` for each prefix, by the prefix's last block.
        """
        prefixes = {copy.keys[-1]: copy.keys for copy in self._copies.values()}
        match = self._view.prefixes.match
        return {tip: match(keys).num_blocks == len(keys) for tip, keys in prefixes.items()}

    def _follow(self, holders: dict[BlockKey, NDArray[np.bool_]], now_s: float) -> None:
        """Record which copies have arrived.

        Copies of lost instances are forgotten, and so are copies that have been missing for long.
        """
        view = self._view
        for name, copy in list(self._copies.items()):
            slot = view.slot_of(copy.instance.name)
            if slot is None or not view.holds(slot, copy.instance):
                del self._copies[name]
                continue
            copy.is_there = holders[copy.keys[-1]].item(slot)
            if copy.is_there or copy.is_in_flight(now_s):
                copy.missed_s = None
            elif copy.missed_s is None:
                copy.missed_s = now_s
            elif now_s >= copy.missed_s + AGAIN_S:
                del self._copies[name]

    def _drop(self, holders: dict[BlockKey, NDArray[np.bool_]]) -> list[Effect]:
        """Drop the cold blocks of each copy."""
        view = self._view
        effects = []
        num_dropped: Counter[BlockKey] = Counter()
        for name, copy in list(self._copies.items()):
            if not copy.is_there:
                continue
            tip, slot = copy.keys[-1], view.slot_of(copy.instance.name)
            assert slot is not None  # copies of lost instances have been forgotten
            held = view.loads.is_prefill & holders[tip]
            held[slot] = False
            num_others = int(held.sum()) - num_dropped[tip]
            num_warm = self._heat.depth(copy.keys, self.settings.uses_per_copy * num_others / 2)
            if num_others < 1 or num_warm == len(copy.keys):
                continue
            num_dropped[tip] += 1
            self.num_dropped_blocks += len(copy.keys) - num_warm
            effects.append(Effect(copy.instance.identity, DropCopies(list(copy.keys[num_warm:]))))
            del self._copies[name]
            if num_warm:
                copy.keys = copy.keys[:num_warm]
                self._copies.setdefault((copy.instance.name, copy.keys[-1]), copy)
        return effects

    # -- new copies ---------------------------------------------------------------------------------

    def _warm(self, layout: KVLayout, now_s: float) -> list[Effect]:
        """Order the hottest prefixes for instances that have just begun to compute prompts."""
        view = self._view
        slots = {
            view.instance_at(slot).identity: slot for slot in view.loads.is_prefill.nonzero()[0].tolist()
        }
        known, self._known = self._known, set(slots)
        return [
            effect
            for identity, slot in slots.items()
            if identity not in known
            for effect in self._warm_one(slot, layout, now_s)
        ]

    def _warm_one(self, slot: int, layout: KVLayout, now_s: float) -> list[Effect]:
        """Order the hottest prefixes for one new instance.

        A prefix needs half the uses that justify a further copy: with fewer uses the copy would be dropped at
        once.
        """
        view = self._view
        room_blocks = view.loads.prefill_room_blocks.item(slot) // _ROOM_SHARE
        effects: list[Effect] = []
        left_bytes = self._left_bytes(now_s)
        for prefix in self.hottest(self.settings.uses_per_copy / 2):
            match = view.prefixes.match(prefix)
            num_holders = int((view.loads.is_prefill & (match.num_blocks >= len(prefix))).sum())
            depth = self._heat.depth(prefix, self.settings.uses_per_copy * max(1, num_holders) / 2)
            depth = min(depth, match.num_best_blocks)
            num_lacking = depth - match.num_blocks_at(slot)
            num_bytes = num_lacking * layout.block_bytes
            if 0 < num_bytes <= left_bytes and num_lacking <= room_blocks:
                left_bytes -= num_bytes
                source = view.instance_at(self._source(match, depth, layout))
                copy = PrefixCopy(view.instance_at(slot), prefix[:depth], num_bytes, now_s + FETCH_S)
                effects.append(self._order(copy, source, layout, now_s))
        return effects

    def _left_bytes(self, now_s: float) -> int:
        """Return the bytes of copies that can still be ordered now."""
        in_flight = [copy.num_bytes for copy in self._copies.values() if copy.is_in_flight(now_s)]
        return self.settings.most_bytes - sum(in_flight)

    def _replicate(self, layout: KVLayout, now_s: float) -> list[Effect]:
        """Order copies of hot prefixes, hottest first, until the limit of bytes is reached."""
        left_bytes = self._left_bytes(now_s)
        effects = []
        self._hot = self._hottest([*self._noted, *self._hot], self.settings.uses_per_copy)
        self._noted.clear()
        for keys in self._hot:
            for copy, source in self._lacking(keys, layout, left_bytes, now_s):
                left_bytes -= copy.num_bytes
                effects.append(self._order(copy, source, layout, now_s))
        return effects

    def _order(self, copy: PrefixCopy, source: Instance, layout: KVLayout, now_s: float) -> Effect:
        num_new_blocks = copy.num_bytes // layout.block_bytes
        self.num_ordered_blocks += num_new_blocks
        self._add(copy, len(copy.keys) - num_new_blocks, now_s)
        order = Replicate(list(copy.keys), source.registration.shards, FETCH_S)
        return Effect(copy.instance.identity, order)

    def _hottest(self, noted: Iterable[Sequence[BlockKey]], num_uses: float) -> list[Sequence[BlockKey]]:
        """Return the most used prefixes of these prompts, each once, at most `_MOST_PREFIXES`.

        All of them have more than `num_uses` uses.
        """
        prefixes: dict[BlockKey, Sequence[BlockKey]] = {}
        for keys in noted:
            if depth := self._heat.depth(keys, num_uses):
                prefixes.setdefault(keys[depth - 1], keys[:depth])
        return heapq.nlargest(_MOST_PREFIXES, prefixes.values(), key=lambda keys: self._heat.uses(keys[-1]))

    def _lacking(
        self, keys: Sequence[BlockKey], layout: KVLayout, left_bytes: int, now_s: float
    ) -> list[tuple[PrefixCopy, Instance]]:
        """Return the further copies that a prefix's uses justify, each with the instance to fetch it from."""
        view = self._view
        match = view.prefixes.match(keys)
        num_known = int(match.num_blocks.max(initial=0))
        num_blocks = self._with_coming(match.num_blocks, keys, now_s)
        is_prefill = view.loads.is_prefill
        lacking: list[tuple[PrefixCopy, Instance]] = []
        for number in range(1, int(is_prefill.sum())):
            depth = min(self._heat.depth(keys, self.settings.uses_per_copy * number), num_known)
            if int((is_prefill & (num_blocks >= depth)).sum()) > number:
                continue
            target = self._target(num_blocks, keys, depth, now_s) if depth else None
            if target is None:
                break
            num_held = num_blocks.item(target)
            depth = min(depth, num_held + left_bytes // layout.block_bytes)
            if depth <= num_held:
                break
            num_bytes = (depth - num_held) * layout.block_bytes
            source = self._source(match, depth, layout)
            copy = PrefixCopy(view.instance_at(target), keys[:depth], num_bytes, now_s + FETCH_S)
            lacking.append((copy, view.instance_at(source)))
            num_blocks[target] = depth
            left_bytes -= num_bytes
        return lacking

    def _with_coming(
        self, num_blocks: NDArray[np.int32], keys: Sequence[BlockKey], now_s: float
    ) -> NDArray[np.int32]:
        """Return the number of leading blocks of each instance after the copies in flight have arrived.

        `num_blocks` has the present numbers.
        """
        num_blocks = num_blocks.copy()
        for copy in self._copies.values():
            depth = min(len(copy.keys), len(keys))
            if keys[depth - 1] == copy.keys[depth - 1] and copy.is_in_flight(now_s):
                slot = self._view.slot_of(copy.instance.name)
                assert slot is not None  # copies of lost instances have been forgotten
                num_blocks[slot] = max(num_blocks.item(slot), depth)
        return num_blocks

    def _target(
        self, num_blocks: NDArray[np.int32], keys: Sequence[BlockKey], depth: int, now_s: float
    ) -> int | None:
        """Return the slot of the prefill instance that should fetch the first `depth` blocks; None for none.

        The instance is the one with the shortest queue among those that lack some of these blocks and have
        room for them.
        """
        view, loads = self._view, self._view.loads
        is_possible = loads.is_prefill & (num_blocks < depth)
        is_possible &= depth - num_blocks <= loads.prefill_room_blocks // _ROOM_SHARE
        queue_s = np.where(is_possible, loads.queue_s(now_s), np.inf)
        for slot in queue_s.argsort(kind="stable").tolist():
            if not is_possible[slot]:
                break
            if (view.instance_at(slot).name, keys[depth - 1]) not in self._copies:
                return int(slot)
        return None

    def _source(self, match: PrefixMatch, depth: int, layout: KVLayout) -> int:
        """Return the slot of the instance that can send the first `depth` blocks earliest.

        The instance is the one with the fewest bytes of transfers ahead plus bytes of these blocks on SSD.
        """
        (holders,) = (match.num_blocks >= depth).nonzero()
        num_ssd_blocks = np.maximum(depth - match.num_dram_blocks[holders], 0)
        ahead_bytes = self._view.transfers.ahead_bytes(holders) + num_ssd_blocks * float(layout.block_bytes)
        return int(holders[ahead_bytes.argmin()])

    def _add(self, copy: PrefixCopy, num_held_blocks: int, now_s: float) -> None:
        """Record an ordered copy.

        A long prefix that is fetched in parts counts as one copy: the copy of a further part replaces the
        copy that it continues.
        """
        if num_held_blocks:
            earlier = self._copies.pop((copy.instance.name, copy.keys[num_held_blocks - 1]), None)
            if earlier is not None and earlier.is_in_flight(now_s):
                copy.num_bytes += earlier.num_bytes
        self._copies[copy.instance.name, copy.keys[-1]] = copy
        if len(self._copies) > MOST_COPIES:
            del self._copies[next(iter(self._copies))]
