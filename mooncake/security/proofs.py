"""The mutual proof of two sides of a connection that they have the cluster key, without sending it.

    connecting side                                   accepting side
    nonce                                     ->
                                              <-      nonce, proof
    proof                                     ->      only then anything else

Each proof covers both nonces, so it is invalid on another connection, and has its own label, so it cannot be
reflected to its sender. The accepting side proves first, so the connecting side reveals nothing to a peer
with another key.

Owns: the proofs of both sides. Does not know: sockets, the messages that carry them.
"""

import hmac
import secrets
from typing import NamedTuple

from mooncake.security.keys import ClusterKey

NONCE_BYTES = 32


class Labels(NamedTuple):
    """The labels of the proofs on one kind of connection."""

    connecting: bytes
    accepting: bytes


class ConnectingSide:
    """The connecting side of a mutual proof."""

    def __init__(self, key: ClusterKey, labels: Labels) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._key, self._labels = key, labels

    def recognises(self, nonce: bytes, proof: bytes) -> bool:
        """Return whether the peer's nonce and proof show that the peer has the same key."""
        return hmac.compare_digest(proof, self._key.proof(self._labels.accepting, self.nonce, nonce))

    def proof(self, nonce: bytes) -> bytes:
        """Return the proof for the peer that has sent this nonce."""
        return self._key.proof(self._labels.connecting, nonce, self.nonce)


class AcceptingSide:
    """The accepting side of a mutual proof."""

    def __init__(self, key: ClusterKey, labels: Labels, peer_nonce: bytes) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.proof = key.proof(labels.accepting, peer_nonce, self.nonce)
        self._expected = key.proof(labels.connecting, self.nonce, peer_nonce)

    def admits(self, proof: bytes) -> bool:
        """Return whether `proof` comes from a peer with the key."""
        return hmac.compare_digest(proof, self._expected)
