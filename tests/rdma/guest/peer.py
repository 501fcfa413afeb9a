"""The other process of a test: does what it is asked to, line by line, on stdin and stdout."""

import asyncio
import sys
from typing import Any

import msgspec

from messenger.rdma import windows
from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaError
from messenger.rdma.info import EndpointInfo
from tests.rdma.guest.nodes import Node, Place


class Peer:
    """Every public method is a request."""

    def __init__(self, device_name: str, size_bytes: int) -> None:
        self.node = Node(device_name, size_bytes)
        self.endpoint: Endpoint | None = None
        self.grants: list[windows.Grant] = []
        self.writing: asyncio.Task[str] | None = None

    async def connect(self, info: Any) -> Place:
        if self.endpoint is not None:
            self.endpoint.close()
        self.endpoint = self.node.endpoint()
        place = Place(self.endpoint.local_info(), self.node.memory.address, self.node.memory.remote_key)
        self.endpoint.connect(msgspec.convert(info, EndpointInfo))
        return place

    async def fill_randomly(self, seed: int) -> None:
        self.node.fill_randomly(seed)

    async def digest(self, offset: int, num_bytes: int) -> int:
        return self.node.digest(offset, num_bytes)

    async def grant(self, ranges: list[list[int]]) -> list[int]:
        assert self.endpoint is not None
        wanted = [windows.Range(offset, num_bytes) for offset, num_bytes in ranges]
        self.grants.append(await windows.grant(self.endpoint, self.node.memory, wanted))
        return self.grants[-1].remote_keys

    async def start_writing(self, address: int, num_bytes: int, remote_key: int) -> None:
        """Writes the same range over and over, with other bytes each time, until that fails."""
        self.writing = asyncio.create_task(self._write(address, num_bytes, remote_key))

    async def failure(self) -> str:
        """What ended the writing: waits for it."""
        assert self.writing is not None
        return await self.writing

    async def _write(self, address: int, num_bytes: int, remote_key: int) -> str:
        assert self.endpoint is not None
        value = 0
        while True:
            value = value % 255 + 1
            self.node.bytes[:num_bytes] = value
            try:
                await self.endpoint.write([(0, address, num_bytes)], remote_key)
            except RdmaError as error:
                return str(error)


async def serve(peer: Peer) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        method, arguments = msgspec.json.decode(line)
        answer = await getattr(peer, method)(*arguments)
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Peer(sys.argv[1], int(sys.argv[2]))))
