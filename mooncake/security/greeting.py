"""Messages of the mutual proof (`proofs`) of two processes that both have the cluster's key.

    client                                            server
    Greeting(nonce)                           ->
                                              <-      Challenge(nonce, proof)
    Proof(proof)                              ->      only then anything else

Owns: these messages, the labels of each kind of connection. Does not know: sockets, later messages.
"""

from typing import Annotated

import msgspec

from mooncake.security import proofs
from mooncake.security.keys import ClusterKey
from mooncake.security.proofs import NONCE_BYTES, Labels

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]

POOL = Labels(connecting=b"pool client", accepting=b"pool")
"""The labels of a connection from a client on another host to a pool."""
MODULES = Labels(connecting=b"modules owner", accepting=b"modules helper")
"""The labels of a connection from an owner of modules to a helper on another host."""


class Greeting(msgspec.Struct, tag=True, frozen=True):
    """The first message of a client. Answered by `Challenge`."""

    nonce: Nonce


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The server's proof that it knows the cluster's key. Answered by `Proof`."""

    nonce: Nonce
    proof: bytes


class Proof(msgspec.Struct, tag=True, frozen=True):
    """The client's proof that it knows the cluster's key. Not answered; a wrong proof ends the connection."""

    proof: bytes


class GreetingClient:
    """The client's end of the greeting on one connection."""

    def __init__(self, key: ClusterKey, labels: Labels) -> None:
        self._side = proofs.ConnectingSide(key, labels)
        self.greeting = Greeting(self._side.nonce)

    def answer(self, challenge: Challenge) -> Proof | None:
        """Return the proof that this client has the key; None if the server has another key.

        Such a server must get no further message.
        """
        if not self._side.recognises(challenge.nonce, challenge.proof):
            return None
        return Proof(self._side.proof(challenge.nonce))


class GreetingServer:
    """The server's end of the greeting on one connection."""

    def __init__(self, key: ClusterKey, labels: Labels, greeting: Greeting) -> None:
        self._side = proofs.AcceptingSide(key, labels, greeting.nonce)
        self.challenge = Challenge(self._side.nonce, self._side.proof)

    def admits(self, proof: Proof) -> bool:
        """Return whether a proof comes from a client that has the key."""
        return self._side.admits(proof.proof)
