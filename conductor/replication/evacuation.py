"""Copies of blocks that would be lost with an instance that leaves: pinned blocks and hot prefixes.

If every other instance holds fewer blocks of such a prefix than the leaving instance, an instance with room
fetches the prefix. An instance that computes prompts is preferred. The copies travel as bulk, and their bytes
in flight are limited. A leaving instance waits for its copies, but at most for `MOST_S`: blocks that have not
arrived by then are computed again when they are needed.

Owns: which blocks are copied to which instance, and how many are left. Does not know: why an instance leaves,
how blocks are sent, the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from conductor.effects import Effect
from conductor.replication.contexts import Contexts
from conductor.replication.copies import Replication
from conductor.settings import ReplicationSettings
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance
from mooncake.messages.block_orders import Replicate
from mooncake.messages.blocks import BlockKey

MOST_S = 20.0
"""The most seconds for which an instance waits for copies of its blocks."""
LEAST_USES = 1.5
"""The number of recent uses above which a prefix is copied: more than one request must have used it."""
_ROOM_SHARE = 2
"""The number by which an instance's room is divided: the result is the most blocks of one copy."""


@dataclass(slots=True)
class _Leaving:
    """An instance that leaves, with the prefixes that must be copied."""

    until_s: float
    wanted: list[Sequence[BlockKey]]
    """Prefixes whose copies have not arrived, the most important first."""
    ordered: dict[BlockKey, tuple[Instance, int]] = field(default_factory=dict)
    """The instance that was ordered to fetch a prefix, and the blocks that it lacks, by the last block."""


class Evacuation:
    """Copies the blocks of leaving instances.

    `replication` knows which prefixes are hot. If it is None, no prefix counts as hot.
    """

    def __init__(self, view: ClusterView, contexts: Contexts, replication: Replication | None) -> None:
        self._view, self._contexts, self._replication = view, contexts, replication
        settings = ReplicationSettings() if replication is None else replication.settings
        self._most_bytes = settings.most_bytes
        self._leaving: dict[bytes, _Leaving] = {}
        self.num_ordered_blocks = 0

    def go_on(self, leaving: Sequence[Instance], now_s: float) -> list[Effect]:
        """Order the copies for which there is room. The caller should call it about twice a second.

        Args:
            leaving: All instances that are to leave. `emptying.num_blocks_left` of each is set to the number
                of blocks that must still be copied.
            now_s: The time.
        """
        identities = {instance.identity for instance in leaving}
        self._leaving = {name: one for name, one in self._leaving.items() if name in identities}
        return [effect for instance in leaving for effect in self._copy(instance, now_s)]

    def _copy(self, instance: Instance, now_s: float) -> list[Effect]:
        leaving = self._leaving.get(instance.identity)
        if leaving is None:
            leaving = self._leaving[instance.identity] = _Leaving(now_s + MOST_S, self._wanted(instance))
        num_left, num_in_flight, effects = 0, 0, list[Effect]()
        still_wanted = []
        for keys in leaving.wanted if now_s < leaving.until_s else ():
            num_blocks, num_held = self._held(instance, keys)
            num_lacking = num_held - int(num_blocks.max(initial=0))
            if num_lacking <= 0:
                continue
            target = leaving.ordered.get(keys[-1])
            if target is not None and not self._takes_requests(target[0]):
                target = None  # the target is lost, or leaves itself
            if target is None:
                target = self._target(keys, num_blocks, num_in_flight)
                if target is None and not num_in_flight:
                    continue  # no instance has room for the prefix
                if target is not None:
                    leaving.ordered[keys[-1]] = target
                    self.num_ordered_blocks += target[1]
                    order = Replicate(list(keys), instance.registration.shards, leaving.until_s - now_s)
                    effects.append(Effect(target[0].identity, order))
            num_in_flight += 0 if target is None else target[1]
            num_left += num_lacking
            still_wanted.append(keys)
        leaving.wanted = still_wanted
        assert instance.emptying is not None
        instance.emptying.num_blocks_left = num_left
        return effects

    def _wanted(self, instance: Instance) -> list[Sequence[BlockKey]]:
        """Return the prefixes to copy. Each ends at the last block that the instance holds."""
        pinned = self._contexts.pinned_on(instance)
        hot = [] if self._replication is None else self._replication.hottest(LEAST_USES)
        slot = self._view.slot_of(instance.name)
        assert slot is not None
        prefixes: dict[BlockKey, Sequence[BlockKey]] = {}
        for keys in (*pinned, *hot):
            num_held = self._view.prefixes.match(keys).num_blocks_at(slot)
            if num_held:
                prefixes.setdefault(keys[num_held - 1], keys[:num_held])
        return list(prefixes.values())

    def _held(self, instance: Instance, keys: Sequence[BlockKey]) -> tuple[np.ndarray, int]:
        """Return the numbers of leading blocks of `keys` at the staying instances and at the leaving one.

        The first value is by slot, with 0 for instances that do not stay.
        """
        slot = self._view.slot_of(instance.name)
        assert slot is not None
        num_blocks = self._view.prefixes.match(keys).num_blocks
        return np.where(self._stays, num_blocks, 0), int(num_blocks[slot])

    @property
    def _stays(self) -> np.ndarray:
        loads = self._view.loads
        return loads.is_prefill | loads.is_decode

    def _takes_requests(self, instance: Instance) -> bool:
        slot = self._view.slot_of(instance.name)
        return slot is not None and self._view.holds(slot, instance) and bool(self._stays[slot])

    def _target(
        self, keys: Sequence[BlockKey], num_blocks: np.ndarray, num_in_flight: int
    ) -> tuple[Instance, int] | None:
        """Return the instance that should fetch a prefix, and the number of blocks that it lacks.

        An instance that computes prompts is preferred, then one that lacks few blocks. None if no instance
        can fetch the prefix now.
        """
        loads = self._view.loads
        num_lacking = len(keys) - num_blocks
        room_blocks = np.maximum(loads.prefill_room_blocks, loads.decode_room_blocks) // _ROOM_SHARE
        (able,) = (self._stays & (num_lacking <= room_blocks)).nonzero()
        if not able.size:
            return None
        computes = (loads.is_prefill | loads.inlines)[able]
        slot = int(able[np.lexsort((num_lacking[able], ~computes))[0]])
        num_new = int(num_lacking[slot])
        if num_in_flight and (num_in_flight + num_new) * self._view.block_bytes > self._most_bytes:
            return None
        return self._view.instance_at(slot), num_new
