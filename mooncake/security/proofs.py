"""The mutual proof of two sides of a connection that they have the cluster key, without sending it.

    visitor                                           host
    nonce                                     ->
                                              <-      nonce, proof
    proof                                     ->      only then anything else

Each proof covers both nonces, so it is invalid on another connection, and has its own label, so it cannot be
reflected to its sender. The host proves first, so a visitor reveals nothing to a host with another key.

Owns: the proofs of both sides. Does not know: sockets, the messages that carry them.
"""

import hmac
import secrets
from typing import NamedTuple

from mooncake.security.keys import ClusterKey

NONCE_BYTES = 32


class Labels(NamedTuple):
    """The labels of the proofs on one kind of connection."""

    visitor: bytes
    host: bytes


class ConnectingSide:
    """The connecting side of a mutual proof."""

    def __init__(self, key: ClusterKey, labels: Labels) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._key, self._labels = key, labels

    def recognises(self, nonce: bytes, proof: bytes) -> bool:
        """Return whether the host's answer proves that it has the same key."""
        return hmac.compare_digest(proof, self._key.proof(self._labels.host, self.nonce, nonce))

    def proof(self, nonce: bytes) -> bytes:
        """Return the proof for the host that has sent this nonce."""
        return self._key.proof(self._labels.visitor, nonce, self.nonce)


class AcceptingSide:
    """The accepting side of a mutual proof."""

    def __init__(self, key: ClusterKey, labels: Labels, visitor_nonce: bytes) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.proof = key.proof(labels.host, visitor_nonce, self.nonce)
        self._expected = key.proof(labels.visitor, self.nonce, visitor_nonce)

    def admits(self, proof: bytes) -> bool:
        """Return whether `proof` comes from a holder of the key."""
        return hmac.compare_digest(proof, self._expected)
