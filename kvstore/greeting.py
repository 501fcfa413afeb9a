"""How a pool and a client on another host show each other that they know the cluster's key.

    client                                            pool
    Greeting(nonce)                           ->
                                              <-      Challenge(nonce, proof)
    Proof(proof)                              ->      only then anything else

The key is never sent. Each proof is over both nonces, so that what was said on one connection is of no use
on another, and under a label of its own, so that none can be thrown back at whom it came from. The pool
proves first: a client tells a pool with another key nothing.

Owns: what is proved, on either side. Does not know: sockets, what is said after it.
"""

import hmac
import secrets

from kvstore.messages import NONCE_BYTES, Challenge, Greeting, Proof
from mooncake.keys import ClusterKey

_CLIENT, _POOL = b"pool client", b"pool"


class Visitor:
    """The client of one connection."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self.greeting = Greeting(secrets.token_bytes(NONCE_BYTES))

    def answer(self, challenge: Challenge) -> Proof | None:
        """None if the pool has another key: then nothing must be said to it any more."""
        expected = self._key.proof(_POOL, self.greeting.nonce, challenge.nonce)
        if not hmac.compare_digest(challenge.proof, expected):
            return None
        return Proof(self._key.proof(_CLIENT, challenge.nonce, self.greeting.nonce))


class Doorkeeper:
    """The pool's end of one connection."""

    def __init__(self, key: ClusterKey, greeting: Greeting) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.challenge = Challenge(nonce, key.proof(_POOL, greeting.nonce, nonce))
        self._expected = key.proof(_CLIENT, nonce, greeting.nonce)

    def admits(self, proof: Proof) -> bool:
        """Whether it comes from somebody who has the key."""
        return hmac.compare_digest(proof.proof, self._expected)
