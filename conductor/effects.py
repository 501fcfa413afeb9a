"""The messages that the Conductor gets and sends, as values without IO."""

import msgspec

from mooncake.messages.fronts import FromFront, ToFront
from mooncake.messages.workers import FromWorker, ToWorker

ToConductor = FromWorker | FromFront


class Effect(msgspec.Struct, frozen=True):
    """A message that the Conductor sends to a peer.

    `peer` is the identity of a worker or a front: its socket's, or the fixed one of the front in the
    Conductor's own process.
    """

    peer: bytes
    message: ToWorker | ToFront
