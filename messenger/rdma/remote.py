"""Writes to pages that a peer has opened, and reads of blocks that a peer has found.

A range is opened for one transfer and one queue pair, so each lane asks for ranges of its own.

Owns: the ranges that are open to this side on one lane. Does not know: the connection beside the queue pair.
"""

import asyncio
from collections.abc import Callable, Sequence

from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaError
from messenger.rdma.memory import RdmaMemory
from messenger.transport.transports import Inlet, SourceLayers, Transport
from messenger.wire.checksums import address_of, layer_checksums
from messenger.wire.messages import Expose, Exposed, ExposedPage, FoundBlock, Message, Write
from mooncake.errors import TransferError
from mooncake.messages.blocks import KVLayout


class RemotePages:
    """The placement of one lane's bytes in the peer's pages.

    `ask` sends a message to the peer, whose blocks have `layout`.
    """

    def __init__(self, endpoint: Endpoint, layout: KVLayout, ask: Callable[[Message], None]) -> None:
        self._endpoint = endpoint
        self._layout = layout
        self._ask = ask
        self._opened: dict[int, asyncio.Future[dict[int, ExposedPage]]] = {}
        """Open pages by transfer."""

    @property
    def failure(self) -> RdmaError | None:
        """The reason why nothing can be written any more; None while writes are possible."""
        return self._endpoint.failure

    def close(self) -> None:
        """Fail all writes. No byte of them moves afterwards."""
        self._endpoint.close()
        for transfer_id in list(self._opened):
            self.forget(transfer_id)

    async def write(self, write: Write, layer_bytes: int) -> None:
        """Place the bytes of all entries, `layer_bytes` bytes of each layer. Raises TransferError."""
        self._endpoint.check_usable()  # a write that begins after `close` would wait for pages in vain
        if write.transfer_id not in self._opened:
            self._opened[write.transfer_id] = asyncio.get_running_loop().create_future()
            self._ask(Expose(write.transfer_id, write.grant_id))
        pages = await self._pages(write.transfer_id)
        layout, skipped_bytes = self._layout, write.skipped_bytes(self._layout)
        slices, keys = [], []
        for entry in write.entries:
            page = pages.get(entry.page)
            if page is None:
                continue  # the page is complete and the write a repetition, or the peer will refuse it
            address = page.address + skipped_bytes + entry.layer_begin * layout.layer_bytes
            slices.append((entry.source_offset, address, entry.num_layers * layer_bytes))
            keys.append(page.remote_key)
        await self._endpoint.write(slices, keys)

    async def _pages(self, transfer_id: int) -> dict[int, ExposedPage]:
        opened = self._opened[transfer_id]
        await asyncio.wait([opened])
        if opened.cancelled():
            raise TransferError("the transfer has ended")
        return opened.result()

    def exposed(self, answer: Exposed) -> None:
        opened = self._opened.get(answer.transfer_id)
        if opened is None or opened.done():
            return  # of a transfer that has ended
        if answer.failure is not None:
            opened.set_exception(TransferError(answer.failure))
            opened.exception()  # counts as retrieved, if nobody waits for it
        else:
            opened.set_result({page.page: page for page in answer.pages})

    def forget(self, transfer_id: int) -> None:
        """Forget the open pages of a transfer that has ended."""
        opened = self._opened.pop(transfer_id, None)
        if opened is not None:
            opened.cancel()


class RdmaReadInlet(Inlet):
    """The inlet that reads found blocks into this side's segment."""

    transport = Transport.RDMA

    def __init__(self, endpoint: Endpoint, memory: RdmaMemory) -> None:
        self._endpoint = endpoint
        self._memory = memory

    async def fill(
        self, sources: Sequence[SourceLayers], views: Sequence[memoryview], layer_bytes: int
    ) -> list[bytes]:
        slices, keys = [], []
        for source, view in zip(sources, views, strict=True):
            assert isinstance(source, FoundBlock)
            slices.append((address_of(view) - self._memory.address, source.address, len(view)))
            keys.append(source.remote_key)
        await self._endpoint.read(slices, keys)
        return [layer_checksums(view, layer_bytes) for view in views]

    def fill_now(
        self, sources: Sequence[SourceLayers], views: Sequence[memoryview], layer_bytes: int
    ) -> None:
        """Return None, as reads by the device always take a while."""


class RdmaWriteInlet(Inlet):
    """The receiver's inlet for writes by RDMA.

    The bytes are in place before the frame arrives, so they are only verified.
    """

    transport = Transport.RDMA

    def fill_now(
        self, sources: Sequence[SourceLayers], views: Sequence[memoryview], layer_bytes: int
    ) -> list[bytes]:
        return [layer_checksums(view, layer_bytes) for view in views]
