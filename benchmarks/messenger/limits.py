"""The limits of sockets when more than one request is in flight.

Owns: streams without acknowledgement, two streams at once, round trips. Does not know: any engine.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from benchmarks.kvstore.echo import DONE, REQUEST, poll, receive, send_all
from benchmarks.kvstore.limits import RawStream, serve, tcp_pair
from benchmarks.kvstore.rounds import Sample
from benchmarks.kvstore.workload import WORKING_SET_BYTES, Bytes, Memory, Op, Ring

MESSAGE_BYTES = 64
_STREAMED_BYTES = 32 << 20


class Streaming(RawStream):
    """One TCP stream with a request for each block, and one acknowledgement after a great many blocks."""

    def __init__(self) -> None:
        super().__init__("tcp")

    def put(self, indices: Sequence[int]) -> None:
        assert self._sock is not None
        for i in indices:
            send_all(self._sock, [REQUEST.pack(b"s", i, 1), self._sources[i]])
        self._sock.sendall(REQUEST.pack(b"p", 0, 0))
        if self._sock.recv(len(DONE)) != DONE:
            raise RuntimeError("the other end of the stream has ended")

    def get(self, indices: Sequence[int]) -> None:
        assert self._sock is not None
        self._sock.sendall(b"".join(REQUEST.pack(b"g", i, 1) for i in indices))
        if not all(receive(self._sock, self._destinations[i]) for i in indices):
            raise RuntimeError("the other end of the stream has ended")


class StreamingBlocks:
    """The stream `Streaming` as a side of the workload.

    A call lasts as long as the stream needs for many blocks. So only its rate has a meaning.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._stream = Streaming()

    def open(self, block_bytes: int) -> None:
        shape = (-1, block_bytes)
        self._stream.open(self._memory.sources.reshape(shape), self._memory.destinations.reshape(shape))
        self._ring = Ring(WORKING_SET_BYTES // block_bytes)
        self._num_blocks = _STREAMED_BYTES // block_bytes
        for op in ("put", "get"):  # the other end touches its memory
            for _ in range(WORKING_SET_BYTES // _STREAMED_BYTES):
                self._ring.time(getattr(self._stream, op), self._num_blocks, 0)

    def time(self, op: Op, depth: int, budget_s: float) -> list[float]:
        """Return the seconds for `depth` blocks, as a share of each long call."""
        times_s = self._ring.time(getattr(self._stream, op), self._num_blocks, budget_s)
        return [elapsed_s * depth / self._num_blocks for elapsed_s in times_s]

    def close(self) -> None:
        self._stream.close()


class TwoStreams:
    """Two TCP streams, each with half of every block, a thread here and a process at the other end."""

    def __init__(self) -> None:
        self._streams = (RawStream("tcp"), RawStream("tcp"))
        self._thread = ThreadPoolExecutor(1)

    def open(self, sources: Bytes, destinations: Bytes) -> None:
        halves = (len(sources), 2, sources.shape[1] // 2)
        for k, stream in enumerate(self._streams):
            stream.open(sources.reshape(halves)[:, k], destinations.reshape(halves)[:, k])

    def remove(self, indices: Sequence[int]) -> None:
        """Do nothing, as the next put overwrites the blocks."""

    def put(self, indices: Sequence[int]) -> None:
        other = self._thread.submit(self._streams[1].put, indices)
        self._streams[0].put(indices)
        other.result()

    def get(self, indices: Sequence[int]) -> None:
        other = self._thread.submit(self._streams[1].get, indices)
        self._streams[0].get(indices)
        other.result()

    def close(self) -> None:
        self._thread.shutdown()
        for stream in self._streams:
            stream.close()


def time_round_trips(*, is_polling: bool, num_rounds: int) -> Sample:
    """Time round trips of MESSAGE_BYTES over TCP. Both ends either poll, or sleep until a message comes."""
    sock, other = tcp_pair()
    process = serve("polled-messages" if is_polling else "messages", other, 0, MESSAGE_BYTES)
    message, wait = memoryview(bytearray(MESSAGE_BYTES)), poll if is_polling else receive
    times_s = []
    with closing(sock):
        for _ in range(num_rounds):
            started_s = time.perf_counter()
            sock.sendall(message)
            if not wait(sock, message):
                raise RuntimeError("the other end of the stream has ended")
            times_s.append(time.perf_counter() - started_s)
    process.wait()
    return Sample.of(times_s[num_rounds // 10 :], 1)
