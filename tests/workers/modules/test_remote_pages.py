"""Pages at a helper on another host: what is written is read, what does not fit ends the stream."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from mooncake.errors import TransferError
from tests.deadline import DEADLINE_S
from tests.kernels.cpu.isas import SUPPORTED, library_of
from workers.modules import remote_pages
from workers.modules.remote_pages import PagesClient, PagesServer, PagesShape

LIBRARY = library_of(SUPPORTED[0])
NUM_PAGES = 9
SHAPES = [PagesShape(3, (NUM_PAGES, 2, 2, 4, 8), dtype) for dtype in (torch.float32, torch.bfloat16)]


@contextmanager
def connected(
    shape: PagesShape, timeout_s: float = DEADLINE_S
) -> Iterator[tuple[PagesClient, list[torch.Tensor]]]:
    """A client, and the pages that a helper has for it."""
    layers = [torch.randn(shape.layer_shape).to(shape.dtype) for _ in range(shape.num_layers)]
    near, far = socket.socketpair()
    server = PagesServer(LIBRARY, far, shape, layers)
    client = PagesClient(near, shape, timeout_s, lambda: None)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield client, layers
    finally:
        server.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        client.close()
        far.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_at_a_time", [1, 2, NUM_PAGES])
def test_pages_are_read_and_written_by_layer_and_all_together(
    shape: PagesShape, num_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = shape.num_layers * 2 * 2 * 4 * 8 * shape.dtype.itemsize
    monkeypatch.setattr(remote_pages, "_STAGED_BYTES", num_at_a_time * page_bytes)
    pages = [7, 0, 3]
    with connected(shape) as (client, layers):
        assert client.pages_at_a_time == num_at_a_time
        everything = client.new_blocks(3, len(pages))
        client.read(pages, everything)
        assert torch.equal(everything, torch.stack(layers)[:, pages])
        assert torch.equal(client.read_layer(1, torch.tensor(pages)), layers[1][pages])
        before = torch.stack(layers)
        client.write_layer(2, torch.tensor([4, 8]), everything[0, :2])
        before[2, [4, 8]] = everything[0, :2]
        assert torch.equal(torch.stack(layers), before)
        client.write(pages, everything.flip(0).contiguous())
        before[:, pages] = everything.flip(0)
        assert torch.equal(torch.stack(layers), before)


def test_calls_of_many_threads_do_not_mix() -> None:
    with connected(SHAPES[0]) as (client, layers), ThreadPoolExecutor(4) as threads:

        def read(index: int) -> bool:
            layer, page = index % 3, index % NUM_PAGES
            return torch.equal(client.read_layer(layer, torch.tensor([page])), layers[layer][[page]])

        assert all(threads.map(read, range(200)))


@pytest.mark.parametrize(
    ("header", "pages"),
    [
        ((False, 0, 4, 1), [0]),
        ((False, 2, 2, 1), [0]),
        ((True, 1, 0, 1), [0]),
        ((True, 0, 1, 1 << 31), []),
        ((False, 0, 1, 0), []),
        ((False, 0, 1, 1), [NUM_PAGES]),
        ((False, 0, 1, 2), [0, -1]),
    ],
)
def test_what_does_not_fit_is_refused_and_writes_nothing(
    header: tuple[bool, int, int, int], pages: list[int]
) -> None:
    shape = SHAPES[0]
    layers = [torch.zeros(shape.layer_shape) for _ in range(3)]
    near, far = socket.socketpair()
    with near, far:
        server = PagesServer(LIBRARY, far, shape, layers)
        near.sendall(struct.pack("<?III", *header) + struct.pack(f"<{len(pages)}q", *pages))
        with pytest.raises((ValueError, IndexError)):
            server.serve()
    assert not torch.stack(layers).any()


def test_a_lost_helper_fails_each_call() -> None:
    near, far = socket.socketpair()
    lost = threading.Event()
    client = PagesClient(near, SHAPES[0], DEADLINE_S, lost.set)
    far.close()
    for _ in range(2):
        with pytest.raises(TransferError, match="pages cannot be reached"):
            client.read_layer(0, torch.tensor([0]))
        assert lost.is_set()


def test_a_helper_that_stands_still_fails_a_call_in_time() -> None:
    near, far = socket.socketpair()
    with far:
        client = PagesClient(near, SHAPES[0], 0.05, lambda: None)
        with pytest.raises(TransferError, match="timed out"):
            client.read_layer(0, torch.tensor([0]))
        with pytest.raises(TransferError):
            client.write_layer(0, torch.tensor([0]), torch.zeros(1, 2, 2, 4, 8))


class SlowLink(socket.socket):
    """A socket on which bytes move all the time, and so slowly that those of a message take too long."""

    def sendall(self, *_: object) -> None:
        raise TimeoutError("not all bytes were sent within the timeout")


def test_a_message_may_take_longer_than_the_timeout_while_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", SlowLink)
    with connected(SHAPES[0]) as (client, layers):
        blocks = client.read_layer(0, torch.tensor([1]))
        client.write_layer(1, torch.tensor([2]), blocks)
        assert torch.equal(layers[1][2], layers[0][1])


def test_a_client_that_is_closed_ends_a_call_in_progress() -> None:
    near, far = socket.socketpair()
    with far, ThreadPoolExecutor(1) as threads:
        client = PagesClient(near, SHAPES[0], DEADLINE_S, lambda: None)
        reading = threads.submit(client.read_layer, 0, torch.tensor([0]))
        assert far.recv(1), "it has asked"
        client.close()
        with pytest.raises(TransferError):
            reading.result(DEADLINE_S)
