"""The other process of the raw socket limits. It answers until the socket ends.

  python -m benchmarks.kvstore.echo (blocks | keys | messages | polled-messages) FD NUM_BLOCKS BLOCK_BYTES

Owns: the wire format of the raw limits. Does not know: the measurements.
"""

import contextlib
import mmap
import socket
import struct
import sys
from collections.abc import Callable, Sequence

REQUEST = struct.Struct("<cII")
"""The request's format: its kind, the first block, the number of blocks.

The kind is b"p" (put), b"s" (put without acknowledgement) or b"g" (get). The bytes of a put follow the
request. The bytes of a get are the answer.
"""
DONE = b"."
KEY_BYTES = 16
MAX_MESSAGE_BYTES = 1 << 16


def send_all(sock: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Send all buffers. One system call suffices if the socket takes them at once."""
    num_sent = sock.sendmsg(buffers)
    for buffer in buffers:
        if num_sent < len(buffer):
            sock.sendall(memoryview(buffer)[num_sent:])
        num_sent = max(0, num_sent - len(buffer))


def receive(sock: socket.socket, view: memoryview) -> bool:
    """Receive bytes until `view` is full. Returns False at the end of the stream."""
    return sock.recv_into(view, 0, socket.MSG_WAITALL) == len(view)


def serve_blocks(sock: socket.socket, num_blocks: int, block_bytes: int) -> None:
    memory = memoryview(mmap.mmap(-1, num_blocks * block_bytes))
    blocks = [memory[i * block_bytes : (i + 1) * block_bytes] for i in range(num_blocks)]
    header = bytearray(REQUEST.size)
    while receive(sock, memoryview(header)):
        kind, first, count = REQUEST.unpack(header)
        touched = [blocks[(first + i) % num_blocks] for i in range(count)]
        if kind == b"g":
            send_all(sock, touched)
        elif all(receive(sock, block) for block in touched) and kind == b"p":
            sock.sendall(DONE)


def serve_keys(sock: socket.socket) -> None:
    """Answer each message with one byte for each key in the message."""
    while message := sock.recv(MAX_MESSAGE_BYTES):
        sock.send(bytes(len(message) // KEY_BYTES))


def poll(sock: socket.socket, view: memoryview) -> bool:
    """Receive bytes by polling until `view` is full. Returns False at the end of the stream."""
    num_received = 0
    while num_received < len(view):
        with contextlib.suppress(BlockingIOError):
            num_bytes = sock.recv_into(view[num_received:], 0, socket.MSG_DONTWAIT)
            if num_bytes == 0:
                return False
            num_received += num_bytes
    return True


def serve_messages(
    sock: socket.socket, message_bytes: int, wait: Callable[[socket.socket, memoryview], bool]
) -> None:
    """Send each message back."""
    message = memoryview(bytearray(message_bytes))
    while wait(sock, message):
        sock.sendall(message)


if __name__ == "__main__":
    kind, fd, num_blocks, block_bytes = sys.argv[1], *map(int, sys.argv[2:])
    with socket.socket(fileno=fd) as sock:
        match kind:
            case "blocks":
                serve_blocks(sock, num_blocks, block_bytes)
            case "keys":
                serve_keys(sock)
            case "messages":
                serve_messages(sock, block_bytes, receive)
            case "polled-messages":
                serve_messages(sock, block_bytes, poll)
