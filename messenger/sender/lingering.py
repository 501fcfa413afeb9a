"""Listening for the answer to what has just been sent over a lane, if that can come at once.

Owns: for which requests, how long. Does not know: what is sent, what answers mean.
"""

from messenger.sender.outstanding import Outstanding
from messenger.sender.requests import FetchRequest, Request
from messenger.transport.listening import Patience
from messenger.transport.stream import Stream
from messenger.transport.transports import Transport

LINGERED_BYTES = {Transport.TCP: 64 << 10, Transport.SHM: 1 << 20, Transport.RDMA: 0}
"""moved in less time than waking up takes"""
_COPIED_BYTES_PER_S = 8 << 30
"""on a slow machine"""
_COPYING_SPEED = 8
"""by that of moving the same through a socket: others wait for 4 MiB at most, if somebody waits for these"""
_LISTENED_BYTES = 128 << 10
"""what listening for an answer counts for as a turn"""


class Lingering:
    """On one lane."""

    def __init__(self, stream: Stream, outstanding: Outstanding, transport: Transport) -> None:
        self.patience = Patience(stream.listen_s)
        self._stream = stream
        self._outstanding = outstanding
        self._transport = transport

    def linger(self, request: Request) -> None:
        """Listens for the answer to `request`, unless this side has copied it. Counts both for a turn."""
        if request.moving_bytes == 0:
            self._stream.moved(request.num_bytes // _COPYING_SPEED)
            return
        # Over shared memory nothing is moved before a fetch is answered.
        is_short = request.num_bytes <= LINGERED_BYTES[self._transport] or (
            self._transport is Transport.SHM and isinstance(request, FetchRequest)
        )
        is_alone = self._outstanding.num_begun - self._outstanding.num_answered == 1
        if is_short and is_alone and self._stream.may_poll:
            num_answered = self._outstanding.num_answered
            copying_s = request.num_bytes / _COPIED_BYTES_PER_S
            self.patience.listen(self._stream.listen, lambda: self._looked(num_answered), copying_s)
            self.has_listened()

    def has_listened(self) -> None:
        """Others are to have their turn the sooner."""
        self._stream.moved(_LISTENED_BYTES)

    def _looked(self, num_answered: int) -> bool:
        """Whether more than so many answers have come, or nobody needs to look for them any more."""
        if self._stream.may_poll:
            self._stream.poll()
        return self._outstanding.num_answered > num_answered or not self._stream.may_poll
