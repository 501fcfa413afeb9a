"""What the Conductor wants done: messages to peers. Pure values."""

from dataclasses import dataclass

from mooncake.messages import ToFront, ToWorker


@dataclass(frozen=True, slots=True)
class Effect:
    """Send `message` to the peer with this socket identity."""

    peer: bytes
    message: ToWorker | ToFront
