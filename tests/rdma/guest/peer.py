"""The other process of a test, with a node on rxe1.

It carries out the requests that it reads, line by line.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

import msgspec

from messenger.rdma import windows
from messenger.rdma.endpoint import Endpoint
from messenger.rdma.errors import RdmaError
from messenger.transport.exposures import Range
from messenger.wire.rdma_info import EndpointInfo
from tests.forked import Forked, preload
from tests.rdma.guest.nodes import Node, Place

preload("tests.rdma.guest.peer")


class Peer:
    """The requests that the process can carry out: every public method is one."""

    def __init__(self, device_name: str, size_bytes: int) -> None:
        self.node = Node(device_name, size_bytes)
        self.endpoint: Endpoint | None = None
        self.grants: list[windows.OpenRanges] = []
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
        wanted = [Range(offset, num_bytes) for offset, num_bytes in ranges]
        self.grants.append(await windows.open_windows(self.endpoint, self.node.memory, wanted))
        return self.grants[-1].remote_keys

    async def start_writing(self, address: int, num_bytes: int, remote_key: int) -> None:
        """Begin to write the same range again and again, until a write fails. The bytes differ each time."""
        self.writing = asyncio.create_task(self._write(address, num_bytes, remote_key))

    async def failure(self) -> str:
        """Wait until the writing fails, and return the reason."""
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


def _run(size_bytes: int) -> None:
    asyncio.run(serve(Peer("rxe1", size_bytes)))


class PeerProcess:
    """A process with a `Peer`. Requests and answers are lines of JSON."""

    def __init__(self, process: Forked, stdin: BinaryIO, stdout: asyncio.StreamReader) -> None:
        self.process = process
        self._stdin, self._stdout = stdin, stdout

    async def ask(self, method: str, *arguments: Any, kind: Any = Any) -> Any:
        self._stdin.write(msgspec.json.encode([method, arguments]) + b"\n")
        answer = await self._stdout.readline()
        assert answer, f"the peer ended at {method}"
        return msgspec.json.decode(answer, type=kind)

    async def connect(self, endpoint: Endpoint) -> Place:
        place: Place = await self.ask("connect", endpoint.local_info(), kind=Place)
        endpoint.connect(place.info)
        return place

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@asynccontextmanager
async def peer_process(size_bytes: int) -> AsyncIterator[PeerProcess]:
    peer_stdin, stdin = os.pipe()
    stdout, peer_stdout = os.pipe()
    process = Forked(
        _run, size_bytes, stdin=peer_stdin, stdout=peer_stdout, stderr=2, environ=dict(os.environ)
    )
    os.close(peer_stdin)
    os.close(peer_stdout)
    answers = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(stdout, "rb")
    )
    with os.fdopen(stdin, "wb", buffering=0) as requests:
        peer = PeerProcess(process, requests, answers)
        try:
            yield peer
        finally:
            peer.kill()
            transport.close()
