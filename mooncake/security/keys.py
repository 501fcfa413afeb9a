"""The cluster key: one secret that all nodes of a cluster share, and nobody else.

A key for each purpose is derived from the secret with HKDF-SHA256 (RFC 5869), under a label of its own.

Owns: the key's text and file, the derivations. Does not know: sockets, handshakes.
"""

import base64
import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from mooncake.errors import ConfigError

SECRET_BYTES = 32
TEXT_PREFIX = "mooncake-cluster-key-1:"
LONGEST_FILE_BYTES = 4096
SALT = b"mooncake-serve cluster key"


@dataclass(frozen=True, slots=True, repr=False)
class ClusterKey:
    """A cluster key with a `secret` of 32 bytes. Its repr shows the key's id, not the secret."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ConfigError(f"a cluster key has {SECRET_BYTES} bytes, not {len(self.secret)}")

    def __repr__(self) -> str:
        return f"ClusterKey({self.key_id})"

    @classmethod
    def generate(cls) -> "ClusterKey":
        """Return a new random key."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def from_text(cls, text: str) -> "ClusterKey":
        """Return the key in a text that `to_text` has made.

        Raises ConfigError, which does not repeat the text.
        """
        encoded = text.strip()
        if not encoded.startswith(TEXT_PREFIX):
            raise ConfigError(f"expected a cluster key, one line that begins with {TEXT_PREFIX}")
        try:
            return cls(base64.b64decode(encoded.removeprefix(TEXT_PREFIX), validate=True))
        except ValueError:  # binascii.Error is one; others come of characters beyond ASCII
            raise ConfigError(f"what follows {TEXT_PREFIX} is damaged; copy the whole line") from None

    def to_text(self) -> str:
        """Return the key as one line, which contains the secret."""
        return TEXT_PREFIX + base64.b64encode(self.secret).decode()

    @classmethod
    def load(cls, path: Path) -> "ClusterKey":
        """Return the key in a file that only its owner can read. Raises ConfigError.

        If this process does not run as root, a file that root owns may also be readable by a group:
        Kubernetes mounts secrets in this way.
        """
        try:
            # A pipe would block here until somebody writes to it.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise ConfigError(
                f"there is no cluster key at {path}; copy the one that the other nodes have,"
                f" or make the first with: mooncake-serve keygen {path}"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot read the cluster key {path}: {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            mode = status.st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is no file; expected the one that mooncake-serve keygen has made")
            is_given = status.st_uid == 0 != os.geteuid()
            if mode & (stat.S_IRWXG | stat.S_IRWXO) & ~(stat.S_IRGRP if is_given else 0):
                raise ConfigError(
                    f"others than its owner may use the cluster key {path} (mode {stat.S_IMODE(mode):04o});"
                    f" forbid that with: chmod 600 {path}"
                )
            content = os.read(descriptor, LONGEST_FILE_BYTES)
        finally:
            os.close(descriptor)
        try:
            return cls.from_text(content.decode("ascii", "replace"))
        except ConfigError as error:
            raise ConfigError(f"{path} holds no cluster key: {error}") from None

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read.

        Raises ConfigError, also if the file exists.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ConfigError(
                f"{path} exists, and a key that is in use must not be lost; name another file or remove it"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot write the cluster key {path}: {error.strerror}") from None
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, 0o600)
                file.write(self.to_text() + "\n")
                file.flush()
                os.fsync(descriptor)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ConfigError(f"cannot write the cluster key {path}: {error.strerror}") from None

    @property
    def key_id(self) -> str:
        """Eight hexadecimal digits that distinguish keys and reveal nothing of the secret."""
        return self._derived(b"name of the key")[:4].hex()

    def curve_pair(self) -> tuple[bytes, bytes]:
        """Return public and secret CURVE key of the cluster's control sockets, in Z85 (ZeroMQ RFC 32)."""
        import zmq  # the rest of the key is of use without ZeroMQ
        from zmq.utils import z85

        secret = z85.encode(self._derived(b"control sockets, CURVE"))
        return zmq.curve_public(secret), secret

    def proof(self, label: bytes, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of `label` and `parts`, which only peers with the key can compute: 32 bytes.

        To be compared by `hmac.compare_digest`. Each part is preceded by its length, so the parts `ab` and
        `c` have another proof than the parts `a` and `bc`.
        """
        mac = hmac.new(self._derived(b"data plane, proofs"), digestmod=hashlib.sha256)
        for part in (label, *parts):
            mac.update(len(part).to_bytes(8, "big"))
            mac.update(part)
        return mac.digest()

    def _derived(self, label: bytes) -> bytes:
        return hkdf_sha256(self.secret, SALT, label)


def hkdf_sha256(secret: bytes, salt: bytes, label: bytes) -> bytes:
    """Return the first 32 bytes of HKDF-SHA256 (RFC 5869, sections 2.2 and 2.3)."""
    pseudorandom_key = hmac.digest(salt, secret, "sha256")
    return hmac.digest(pseudorandom_key, label + b"\x01", "sha256")
