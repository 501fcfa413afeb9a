"""What the Conductor wants done: messages to peers. Pure values."""

import msgspec

from mooncake.messages import ToFront, ToWorker


class Effect(msgspec.Struct, frozen=True):
    """Send `message` to the peer with this socket identity."""

    peer: bytes
    message: ToWorker | ToFront
