"""How two sides of a connection show each other that they know the cluster's key, without sending it.

    visitor                                           host
    nonce                                     ->
                                              <-      nonce, proof
    proof                                     ->      only then anything else

Each proof is over both nonces, so that what was said on one connection is of no use on another, and under a
label of its own, so that none can be thrown back at whom it came from. The host proves first: a visitor tells
one with another key nothing.

Owns: what is proved, on either side. Does not know: sockets, the messages in which this travels.
"""

import hmac
import secrets
from typing import NamedTuple

from mooncake.security.keys import ClusterKey

NONCE_BYTES = 32


class Labels(NamedTuple):
    """Of the proofs of one kind of connection."""

    visitor: bytes
    host: bytes


class Visitor:
    """Who connects; of one connection."""

    def __init__(self, key: ClusterKey, labels: Labels) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._key, self._labels = key, labels

    def recognises(self, nonce: bytes, proof: bytes) -> bool:
        """Whether the host, who answered with these, has the same key."""
        return hmac.compare_digest(proof, self._key.proof(self._labels.host, self.nonce, nonce))

    def proof(self, nonce: bytes) -> bytes:
        """For the host whose nonce this is."""
        return self._key.proof(self._labels.visitor, nonce, self.nonce)


class Doorkeeper:
    """The host's end of one connection."""

    def __init__(self, key: ClusterKey, labels: Labels, visitor_nonce: bytes) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.proof = key.proof(labels.host, visitor_nonce, self.nonce)
        self._expected = key.proof(labels.visitor, self.nonce, visitor_nonce)

    def admits(self, proof: bytes) -> bool:
        """Whether it comes from somebody who has the key."""
        return hmac.compare_digest(proof, self._expected)
