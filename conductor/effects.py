"""Messages to the Conductor, and messages that it sends. Pure values."""

import msgspec

from mooncake.messages.fronts import FromFront, ToFront
from mooncake.messages.workers import FromWorker, ToWorker

ToConductor = FromWorker | FromFront


class Effect(msgspec.Struct, frozen=True):
    """Send `message` to the peer with this socket identity."""

    peer: bytes
    message: ToWorker | ToFront
