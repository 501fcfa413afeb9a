"""The receiving end of a lane: the parts that its transport needs on this side.

Owns: the choice of a transport by a sender's introduction. Does not know: messages after the handshake.
"""

from typing import NamedTuple

from messenger.rdma.exposures import RdmaExposures
from messenger.rdma.remote import RdmaWriteInlet
from messenger.receiver.served_pool import ServedPool
from messenger.shm.copy_table import CopyTable
from messenger.transport import handshake
from messenger.transport.exposures import Exposures
from messenger.transport.stream import Stream
from messenger.transport.transports import Inlet, ShmInlet, TcpInlet
from messenger.wire.messages import Introduction, Welcome
from messenger.wire.rdma_info import EndpointInfo
from mooncake.errors import TransferError


class ReceivingEnd(NamedTuple):
    """The receiving end of a lane, with the welcome by which the sender makes the sending end."""

    inlet: Inlet
    exposures: Exposures
    """The exposures of the lane, which the lane closes.

    If no lane is made of this end, the caller closes them.
    """
    welcome: Welcome
    fd: int | None = None
    """The descriptor that is passed with the welcome."""


class ShmExposures(Exposures):
    """The exposure of a shared-memory lane: the copy slot through which the sender writes granted pages."""

    lets_place = True

    def __init__(self, copy_table: CopyTable, slot: int) -> None:
        self._copy_table, self._slot = copy_table, slot

    def close(self) -> None:
        self._copy_table.leave(self._slot)


async def receiving_end(served_pool: ServedPool, stream: Stream, introduction: Introduction) -> ReceivingEnd:
    """Return the receiving end of a lane over the transport that the introduction asks for.

    The transport is shared memory if the introduction has `segment_bytes`, RDMA if it has an `endpoint`, else
    TCP. Raises OSError or TransferError. The sender is told if there is no device for its queue pair.
    """
    if introduction.segment_bytes is not None:
        return _over_shm(served_pool, stream, introduction)
    if introduction.endpoint is not None:
        return await _over_rdma(served_pool, stream, introduction.endpoint)
    return ReceivingEnd(TcpInlet(stream), Exposures(), Welcome(served_pool.identity))


def _over_shm(served_pool: ServedPool, stream: Stream, introduction: Introduction) -> ReceivingEnd:
    inlet = ShmInlet(stream, stream.take_fd(), introduction.segment_bytes)
    source, shared, slot = served_pool.source, served_pool.shared_segment, None
    if shared is not None and introduction.takes_copy_slot and introduction.identity is not None:
        slot = shared.take_slot(stream.peer_pid)  # a sender without blocks copies none
    page_table = None if shared is None else shared.page_table
    welcome = Welcome(served_pool.identity, len(source.buffer), slot, page_table)
    if shared is None or slot is None:
        return ReceivingEnd(inlet, Exposures(), welcome, source.read_only_fd)
    return ReceivingEnd(inlet, ShmExposures(shared.copy_table, slot.number), welcome, shared.fd)


async def _over_rdma(served_pool: ServedPool, stream: Stream, theirs: EndpointInfo) -> ReceivingEnd:
    try:
        card = await served_pool.cards.answering(theirs)
    except TransferError as error:
        await handshake.refuse(stream, str(error))
        raise
    endpoint = card.endpoint("a sender")
    try:
        endpoint.connect(theirs)
        scratch = await card.open_scratch(endpoint)
    except BaseException:
        endpoint.close()
        raise
    welcome = Welcome(served_pool.identity, endpoint=endpoint.local_info(), scratch=scratch)
    return ReceivingEnd(RdmaWriteInlet(), RdmaExposures(endpoint, card.memory), welcome)
