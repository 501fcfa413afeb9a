"""The messages that the Conductor gets and sends, as values without IO."""

import msgspec

from mooncake.messages.fronts import FromFront, ToFront
from mooncake.messages.workers import FromWorker, ToWorker

ToConductor = FromWorker | FromFront


class Effect(msgspec.Struct, frozen=True):
    """A message to send to the peer with this socket identity."""

    peer: bytes
    message: ToWorker | ToFront
