"""First tokens that a Conductor may not have received. They are sent to its successor again.

Messages arrive in order, so the answer to a heartbeat shows that all messages before the heartbeat were
received. A prompt leaves the prefill instance as soon as its KVCache is sent. If the message with the first
token were lost then, the decode instance would wait in vain for the first token.

Owns: the first tokens that were sent and not confirmed. Does not know: sockets.
"""

from collections import deque

from mooncake.messages.requests import Held, HeldStep
from mooncake.messages.workers import Prefilled


class UnheardPrompts:
    """First tokens that were sent, each kept until a later heartbeat is answered."""

    def __init__(self) -> None:
        self._told: deque[tuple[int, Prefilled]] = deque()
        """Messages with first tokens, each with the number of heartbeats sent before it."""
        self._num_beats = 0
        self._num_answered = 0

    def told(self, prefilled: Prefilled) -> None:
        """Record that a first token is sent."""
        self._told.append((self._num_beats, prefilled))

    def beat(self) -> None:
        """Record that a heartbeat is sent to the Conductor."""
        self._num_beats += 1

    def answered(self) -> None:
        """Record that the Conductor has answered the oldest unanswered heartbeat."""
        self._num_answered += 1
        while self._told and self._told[0][0] < self._num_answered:
            self._told.popleft()

    @property
    def held(self) -> list[Held]:
        """The prompts whose first tokens are kept here, in the form for a report to another Conductor."""
        return [Held(prefilled.ref, HeldStep.PROMPT) for _, prefilled in self._told]

    def take_all(self) -> list[Prefilled]:
        """Return the messages to send to another Conductor after registration.

        The messages are no longer kept here, and the count of heartbeats begins again.
        """
        unheard = [prefilled for _, prefilled in self._told]
        self._told.clear()
        self._num_beats = self._num_answered = 0
        return unheard
