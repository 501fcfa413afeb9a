"""The greeting of a pool and a client on another host, in which each shows that it knows the cluster's key.

    client                                            pool
    Greeting(nonce)                           ->
                                              <-      Challenge(nonce, proof)
    Proof(proof)                              ->      only then anything else

Owns: the messages of `mooncake.security.proofs` here. Does not know: sockets, what is said after it.
"""

from typing import Annotated

import msgspec

from mooncake.security import proofs
from mooncake.security.keys import ClusterKey
from mooncake.security.proofs import NONCE_BYTES

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]

_LABELS = proofs.Labels(visitor=b"pool client", host=b"pool")


class Greeting(msgspec.Struct, tag=True, frozen=True):
    """From the client. Answered by `Challenge`."""

    nonce: Nonce


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The pool's proof that it knows the cluster's key. Answered by `Proof`."""

    nonce: Nonce
    proof: bytes


class Proof(msgspec.Struct, tag=True, frozen=True):
    """The client's proof. Not answered; whoever fails it has his connection closed."""

    proof: bytes


class Visitor:
    """The client of one connection."""

    def __init__(self, key: ClusterKey) -> None:
        self._visitor = proofs.Visitor(key, _LABELS)
        self.greeting = Greeting(self._visitor.nonce)

    def answer(self, challenge: Challenge) -> Proof | None:
        """None if the pool has another key: then nothing must be said to it any more."""
        if not self._visitor.recognises(challenge.nonce, challenge.proof):
            return None
        return Proof(self._visitor.proof(challenge.nonce))


class Doorkeeper:
    """The pool's end of one connection."""

    def __init__(self, key: ClusterKey, greeting: Greeting) -> None:
        self._doorkeeper = proofs.Doorkeeper(key, _LABELS, greeting.nonce)
        self.challenge = Challenge(self._doorkeeper.nonce, self._doorkeeper.proof)

    def admits(self, proof: Proof) -> bool:
        """Whether it comes from somebody who has the key."""
        return self._doorkeeper.admits(proof.proof)
