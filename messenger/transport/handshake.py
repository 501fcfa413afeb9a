"""The handshake of two messengers: each proves that it knows the cluster key, then they exchange identities.

Owns: the handshake on either side. Does not know: messages after it.
"""

import msgspec

from messenger.transport.frames import Frames
from messenger.transport.stream import Stream
from messenger.wire.identity import Identity
from messenger.wire.messages import Challenge, Hello, Introduction, Message, Refused, Welcome
from messenger.wire.protocol import SAME_TLS, SPOKEN, check_identity, common_version, encode_frame
from mooncake.errors import MismatchError, TransferError
from mooncake.security.keys import ClusterKey
from mooncake.security.proofs import NONCE_BYTES, AcceptingSide, ConnectingSide, Labels

_LABELS = Labels(connecting=b"messenger sender", accepting=b"messenger receiver")


class AuthenticationError(TransferError):
    """The peer has another cluster key, hung up, or does not speak the protocol or TLS."""


async def read_message(frames: Frames) -> Message:
    """Return the next message. Raises OSError, or TransferError, also if the message has a payload."""
    frame = await frames.next()
    if frame.payload_bytes:
        raise TransferError("a greeting came with a payload")
    return frame.message


async def introduce(
    frames: Frames, key: ClusterKey, introduction: Introduction, fd: int | None = None
) -> Welcome:
    """Authenticate to a receiver, introduce this side, and return the receiver's welcome.

    Args:
        frames: The frames that arrive.
        key: The cluster key.
        introduction: What this side says of itself; the proof in it is made here.
        fd: The descriptor that is passed with the introduction; None for none.

    Raises OSError if the connection ends later than at the greeting. Raises TransferError if the receiver
    refuses, hangs up at the greeting, or speaks no common version; AuthenticationError if the receiver has
    another key.
    """
    stream = frames.stream
    connecting = ConnectingSide(key, _LABELS)
    await stream.send([encode_frame(Hello(SPOKEN.oldest, connecting.nonce, SPOKEN.newest))])
    try:
        challenge = _accepted(await read_message(frames))
    except OSError as error:
        raise TransferError(
            f"who listens there hangs up at a greeting ({error}): it is no messenger, is about to end, has"
            f" too many unauthenticated connections, or has TLS; {SAME_TLS}"
        ) from error
    assert isinstance(challenge, Challenge)
    if not connecting.recognises(challenge.nonce, challenge.proof):
        raise AuthenticationError(
            "the messenger there has another cluster key; give all nodes the same key file"
        )
    if not SPOKEN.oldest <= challenge.version <= SPOKEN.newest:
        raise TransferError(f"the messenger there speaks version {challenge.version}, not {SPOKEN}")
    proved = msgspec.structs.replace(introduction, proof=connecting.proof(challenge.nonce))
    await stream.send([encode_frame(proved)], fd=fd)
    welcome = _accepted(await read_message(frames))
    assert isinstance(welcome, Welcome)
    return welcome


async def admit(frames: Frames, key: ClusterKey) -> Introduction:
    """Authenticate a sender, and return its introduction.

    Raises AuthenticationError; MismatchError, after telling the sender, if no version is common; OSError if
    the sender cannot be told.
    """
    stream = frames.stream
    try:
        hello = await read_message(frames)
        assert isinstance(hello, Hello)
        version = common_version(hello)
        if len(hello.nonce) != NONCE_BYTES:
            raise AuthenticationError(f"a nonce of {len(hello.nonce)} bytes")
        accepting = AcceptingSide(key, _LABELS, hello.nonce)
        await stream.send([encode_frame(Challenge(accepting.nonce, accepting.proof, version))])
        introduction = await read_message(frames)
        assert isinstance(introduction, Introduction)
    except MismatchError as error:
        await refuse(stream, str(error))
        raise
    except (OSError, TransferError) as error:
        raise AuthenticationError(str(error)) from error
    if not accepting.admits(introduction.proof):
        raise AuthenticationError("it has another cluster key")
    return introduction


async def check_introduction(stream: Stream, ours: Identity, introduction: Introduction) -> None:
    """Check that bytes may be exchanged. Raises MismatchError after telling the sender, or OSError."""
    if introduction.identity is not None:
        try:
            check_identity(ours, introduction.identity)
        except MismatchError as error:
            await refuse(stream, str(error))
            raise


async def refuse(stream: Stream, reason: str) -> None:
    """Tell the sender why it is refused."""
    await stream.send([encode_frame(Refused(reason))])


def _accepted(answer: Message) -> Message:
    if isinstance(answer, Refused):
        raise TransferError(f"refused: {answer.message}")
    return answer
