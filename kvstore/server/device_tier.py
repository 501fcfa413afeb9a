"""The device tier: blocks in the prefix cache of the instance's engine, as its worker reports them.

Only the engine can use these blocks. The messenger reports them in its KV events, so that the Conductor
counts them for prompts that this instance computes.

Owns: the keys of these blocks. Does not know: the blocks' contents, how the worker learns of them.
"""

from collections.abc import Sequence

from kvstore.events.batches import EventLog
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import Tier


class DeviceTier:
    """The blocks in the prefix cache of one worker's engine."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._keys: set[BlockKey] = set()

    @property
    def keys(self) -> list[BlockKey]:
        return list(self._keys)

    def change(self, keys: Sequence[BlockKey], *, is_stored: bool) -> None:
        """Record blocks that the engine's cache has from now on (`is_stored`), or no longer has."""
        if is_stored:
            self._keys.update(keys)
            self._events.stored_all(Tier.DEVICE, keys)
        else:
            self._keys.difference_update(keys)
            self._events.removed_all(Tier.DEVICE, keys)

    def clear(self) -> None:
        """Record that the worker is gone."""
        self.change(self.keys, is_stored=False)
