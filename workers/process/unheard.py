"""The latest first tokens of prompts that a Conductor may not have heard of, for the one that follows it.

Messages arrive in order: the answer to a heartbeat shows that those before it were heard. A prompt leaves
the prefill instance as soon as its KVCache is sent; without its first token its decode instance would wait
for nothing.

Owns: which were not heard. Does not know: sockets.
"""

from collections import deque

from mooncake.messages.workers import Held, HeldStep, Prefilled


class UnheardPrompts:
    """Told first tokens, each until a heartbeat behind it was answered."""

    def __init__(self) -> None:
        self._told: deque[tuple[int, Prefilled]] = deque()
        """Each with the number of heartbeats before it."""
        self._num_beats = 0
        self._num_answered = 0

    def told(self, prefilled: Prefilled) -> None:
        """Record that a first token is told."""
        self._told.append((self._num_beats, prefilled))

    def beat(self) -> None:
        """Record that a heartbeat is sent."""
        self._num_beats += 1

    def answered(self) -> None:
        """Record that the next heartbeat was answered by the Conductor to which it was sent."""
        self._num_answered += 1
        while self._told and self._told[0][0] < self._num_answered:
            self._told.popleft()

    @property
    def held(self) -> list[Held]:
        """These prompts, as another Conductor is to know of them."""
        return [Held(prefilled.ref, HeldStep.PROMPT) for _, prefilled in self._told]

    def take_all(self) -> list[Prefilled]:
        """Return what another Conductor is to be told after the registration. The count begins anew."""
        unheard = [prefilled for _, prefilled in self._told]
        self._told.clear()
        self._num_beats = self._num_answered = 0
        return unheard
