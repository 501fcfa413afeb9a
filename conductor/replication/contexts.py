"""Context caches (Mooncake, section 3): prefixes whose blocks are pinned where they are held.

The blocks of a cache are pinned on one instance. A pin has a deadline that is renewed, so pins of a lost
Conductor end by themselves. The prefix index tells which instance holds most of a cache. If this instance is
lost, or had to evict blocks, a prompt with the cache is computed like any other prompt. Then the cache is
pinned on the instance that has computed the prompt. Pure: no clock, no IO.

Owns: which cache is pinned where, and until when. Does not know: tokens, keys of clients, how a pool pins.
"""

from dataclasses import dataclass
from itertools import islice

from conductor.effects import Effect
from conductor.index.prefix_index import PrefixIndex
from conductor.view.instances import Instance, Instances
from mooncake.messages.block_orders import Pin, Unpin
from mooncake.messages.blocks import BlockKey
from mooncake.messages.workers import InstanceState, Role

PIN_S = 60.0
"""Seconds for which one order pins blocks."""
RENEW_S = 20.0
"""Seconds after which pins are renewed."""


@dataclass(slots=True)
class KeptContext:
    """One context cache. Invariant: the first `num_pinned <= len(keys)` blocks are pinned on `holder`."""

    keys: list[BlockKey]
    expires_s: float
    holder: Instance | None = None
    num_pinned: int = 0
    renew_s: float = 0.0

    @property
    def pinned(self) -> list[BlockKey]:
        """The blocks that `holder` was ordered to pin."""
        return self.keys[: self.num_pinned]


class Contexts:
    """All context caches by their ids."""

    def __init__(self, prefixes: PrefixIndex, instances: Instances) -> None:
        self._prefixes, self._instances = prefixes, instances
        self._contexts: dict[str, KeptContext] = {}

    def newest(self, num_most: int) -> list[tuple[str, KeptContext]]:
        """Return the `num_most` latest caches with their ids, latest first."""
        return list(islice(reversed(self._contexts.items()), num_most))

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all caches. A block that two caches have in common counts twice."""
        return sum(len(context.keys) for context in self._contexts.values())

    @property
    def num_pinned(self) -> int:
        """The number of blocks that are believed to be pinned for caches."""
        return sum(context.num_pinned for context in self._contexts.values())

    def pinned_on(self, instance: Instance) -> list[list[BlockKey]]:
        """Return the pinned blocks of each cache that is pinned on this instance."""
        return [context.pinned for context in self._contexts.values() if context.holder is instance]

    def keep(self, context_id: str, keys: list[BlockKey], ttl_s: float, now_s: float) -> list[Effect]:
        """Add a cache, or restart its time to live of `ttl_s` seconds.

        Two caches with one id must have the same keys.
        """
        context = self._contexts.setdefault(context_id, KeptContext(keys, 0.0))
        context.expires_s, context.renew_s = now_s + ttl_s, now_s
        return self._pin(context, now_s)

    def drop(self, context_id: str) -> list[Effect]:
        """Drop a cache, and unpin its blocks. Idempotent."""
        context = self._contexts.pop(context_id, None)
        return [] if context is None else self._unpin(context)

    def tick(self, now_s: float) -> list[Effect]:
        """Drop expired caches, renew pins, and pin blocks that are not pinned yet."""
        effects = []
        for context_id, context in list(self._contexts.items()):
            if context.expires_s <= now_s:
                effects += self.drop(context_id)
            elif context.renew_s <= now_s or not self._stays(context) or self._may_be_longer(context):
                effects += self._pin(context, now_s)
        return effects

    def _may_be_longer(self, context: KeptContext) -> bool:
        """Return whether any instance holds the cache's first unpinned block.

        The check is one look-up, however long the cache is.
        """
        missing = context.keys[context.num_pinned : context.num_pinned + 1]
        return bool(missing) and bool(self._prefixes.match(missing).num_blocks.any())

    def _stays(self, context: KeptContext) -> bool:
        """Return whether the cache can stay pinned where it is.

        It cannot if its holder is lost or takes no requests. A cache without a holder counts as staying.
        """
        holder = context.holder
        is_serving = holder is None or holder.state is InstanceState.SERVING
        return is_serving and not self._is_lost(context)

    def _is_lost(self, context: KeptContext) -> bool:
        holder = context.holder
        return holder is not None and self._instances.get(holder.name) is not holder

    def _pin(self, context: KeptContext, now_s: float) -> list[Effect]:
        """Pin the cache on the instance that holds most of it now.

        No effects if the same pins were ordered lately.
        """
        before = context.holder, context.num_pinned
        holder, num_held = self._best_holder(context)
        effects = self._unpin(context) if holder is not context.holder else []
        context.holder, context.num_pinned = holder, num_held
        if before != (holder, num_held) or context.renew_s <= now_s:
            context.renew_s = now_s + RENEW_S
            if holder is not None:
                pin = Pin(context.pinned, min(PIN_S, context.expires_s - now_s))
                effects.append(Effect(holder.identity, pin))
        return effects

    def _best_holder(self, context: KeptContext) -> tuple[Instance | None, int]:
        """Return the instance that holds most of the cache, and the number of leading blocks there.

        Returns None and 0 if no instance holds the cache's first block.
        """
        num_blocks = self._prefixes.match(context.keys).num_blocks
        most = int(num_blocks.max(initial=0))
        if not most:
            return None, 0
        slots = self._prefixes.slots
        holders = [
            instance
            for instance in self._instances
            if (slot := slots.get(instance.name)) is not None and num_blocks[slot] == most
        ]
        return max(holders, key=lambda one: _preference(one, context), default=None), most

    def _unpin(self, context: KeptContext) -> list[Effect]:
        """Unpin the cache's blocks, except those that another cache has pinned on the same instance."""
        holder = context.holder
        if holder is None or self._is_lost(context) or not context.num_pinned:
            return []
        wanted = {
            key
            for other in self._contexts.values()
            if other is not context and other.holder is holder
            for key in other.pinned
        }
        keys = [key for key in context.pinned if key not in wanted]
        return [Effect(holder.identity, Unpin(keys))] if keys else []


def _preference(instance: Instance, context: KeptContext) -> tuple[bool, bool, bool]:
    """Return the sort key of possible holders, best last.

    A serving instance is preferred, then the present holder, then an instance that prefills.
    """
    return (
        instance.state is InstanceState.SERVING,
        instance is context.holder,
        instance.role is not Role.DECODE,
    )
