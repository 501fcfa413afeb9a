"""How two messengers show each other that they know the cluster's key, without sending it.

Each proves it over both nonces, so that no answer of one connection is of use on another, and under a label
of its own, so that none can be thrown back at whom it came from. Only then anything else is said.

Owns: the greeting on either side. Does not know: what is said after it.
"""

import hmac
import secrets
from dataclasses import dataclass

from messenger.frames import Frames
from messenger.identity import Identity
from messenger.protocol import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Introduction,
    Message,
    Refused,
    Welcome,
    check_identity,
    check_version,
    encode_frame,
)
from messenger.rdma.endpoint import EndpointInfo
from messenger.stream import Stream
from mooncake.errors import MismatchError, TransferError
from mooncake.keys import ClusterKey

_SENDER, _RECEIVER = b"messenger sender", b"messenger receiver"


class StrangerError(TransferError):
    """Whoever is at the other end does not know the cluster's key, or does not speak the protocol."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What a side of one host lets the other map: its size, and with it a read-only descriptor."""

    num_bytes: int
    read_only_fd: int


async def read_message(frames: Frames) -> Message:
    """The next frame, which has no payload. Raises OSError or TransferError if none comes."""
    frame = await frames.next()
    if frame.payload_bytes:
        raise TransferError("a greeting came with a payload")
    return frame.message


async def introduce(
    frames: Frames,
    key: ClusterKey,
    identity: Identity | None,
    *,
    session: bytes,
    lane: int,
    segment: Segment | None = None,
    endpoint: EndpointInfo | None = None,
) -> Welcome:
    """The sender's part. Raises TransferError if the receiver refuses, StrangerError if it is one."""
    stream = frames.stream
    nonce = secrets.token_bytes(NONCE_BYTES)
    await stream.send([encode_frame(Hello(PROTOCOL_VERSION, nonce))])
    challenge = _accepted(await read_message(frames))
    assert isinstance(challenge, Challenge)
    if not hmac.compare_digest(challenge.proof, key.proof(_RECEIVER, nonce, challenge.nonce)):
        raise StrangerError("the messenger there has another cluster key; give all nodes the same key file")
    introduction = Introduction(
        key.proof(_SENDER, challenge.nonce, nonce),
        identity,
        session,
        lane,
        None if segment is None else segment.num_bytes,
        endpoint,
    )
    fd = None if segment is None else segment.read_only_fd
    await stream.send([encode_frame(introduction)], fd=fd)
    welcome = _accepted(await read_message(frames))
    assert isinstance(welcome, Welcome)
    return welcome


async def admit(frames: Frames, key: ClusterKey) -> Introduction:
    """The receiver's part, up to its `welcome`. Raises StrangerError, MismatchError for another version."""
    stream = frames.stream
    try:
        hello = await read_message(frames)
        assert isinstance(hello, Hello)
        check_version(hello.protocol_version)
        if len(hello.nonce) != NONCE_BYTES:
            raise StrangerError(f"a nonce of {len(hello.nonce)} bytes")
        nonce = secrets.token_bytes(NONCE_BYTES)
        await stream.send([encode_frame(Challenge(nonce, key.proof(_RECEIVER, hello.nonce, nonce)))])
        introduction = await read_message(frames)
        assert isinstance(introduction, Introduction)
    except MismatchError as error:
        await refuse(stream, str(error))
        raise
    except (OSError, TransferError) as error:
        raise StrangerError(str(error)) from error
    if not hmac.compare_digest(introduction.proof, key.proof(_SENDER, nonce, hello.nonce)):
        raise StrangerError("it has another cluster key")
    return introduction


async def welcome(
    stream: Stream,
    ours: Identity,
    introduction: Introduction,
    segment: Segment | None = None,
    endpoint: EndpointInfo | None = None,
) -> None:
    """Raises MismatchError, which the sender is told, if bytes must not be exchanged."""
    if introduction.identity is not None:
        try:
            check_identity(ours, introduction.identity)
        except MismatchError as error:
            await refuse(stream, str(error))
            raise
    fd = None if segment is None else segment.read_only_fd
    num_bytes = None if segment is None else segment.num_bytes
    await stream.send([encode_frame(Welcome(ours, num_bytes, endpoint))], fd=fd)


async def refuse(stream: Stream, reason: str) -> None:
    """Tells the sender why it is turned away."""
    await stream.send([encode_frame(Refused(reason))])


def _accepted(answer: Message) -> Message:
    if isinstance(answer, Refused):
        raise TransferError(f"refused: {answer.message}")
    return answer
