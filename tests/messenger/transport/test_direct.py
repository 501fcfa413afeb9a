"""What is placed before anybody has read its frame, and what is left alone."""

import contextlib
import os
import random
import socket
from collections.abc import Iterator, Sequence

import pytest

from messenger.shm.catalogue import Catalogue
from messenger.transport.direct import DirectPlacement
from messenger.transport.openings import OpenPages, OpenTransfers
from messenger.transport.source import SourceSegment
from messenger.transport.stream import AHEAD_BYTES
from messenger.wire.checksums import layer_checksums
from messenger.wire.messages import (
    Close,
    Fetch,
    FetchDone,
    Found,
    FoundBlock,
    Message,
    Open,
    Write,
    WriteAck,
    WriteEntry,
)
from messenger.wire.protocol import encode_frame
from mooncake.messages.blocks import KVLayout
from tests.messenger.fabric import key
from tests.messenger.pages import Memory

LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16", first_layer=2)
LAYER = LAYOUT.layer_bytes
NUM_PAGES, STRIDE = 4, LAYOUT.block_bytes + 512
GRANT, PAGE, GENERATION = 1 << 60, 2, 7
ANSWER = encode_frame(WriteAck())
DATA = random.Random(1).randbytes(LAYOUT.block_bytes)


class Side:
    """A page that is open, and a connection."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(NUM_PAGES * STRIDE))
        self.pages = OpenPages(self.memory, LAYOUT, NUM_PAGES, STRIDE)
        self.pages.open(PAGE, GENERATION, GRANT)
        self.transfers = OpenTransfers(8)
        direct = DirectPlacement.where_it_can_be()
        assert direct is not None
        self.direct = direct
        nothing = SourceSegment(memoryview(b""), -1)
        self.direct.let_in(self.pages, self.transfers, ANSWER, nothing, None)
        self.buffer = memoryview(bytearray(AHEAD_BYTES))
        self.near, self.far = socket.socketpair()
        self.far.setblocking(False)

    def receive(self, *, may_answer: bool = True) -> bytes:
        """What is left to be read."""
        _, num_ahead = self.direct.receive(
            self.near.fileno(), self.buffer, may_answer=may_answer, may_answer_fetches=may_answer
        )
        return bytes(self.buffer[:num_ahead])

    def answered(self) -> bytes:
        try:
            return self.far.recv(100)
        except BlockingIOError:
            return b""

    def layers(self, page: int, begin: int, end: int) -> memoryview:
        start = page * STRIDE
        return self.memory[start + begin * LAYER : start + end * LAYER]

    @property
    def is_untouched(self) -> bool:
        return not any(self.memory)


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    yield side
    side.near.close()
    side.far.close()


def entry(begin: int = 2, end: int = 6, **changed: object) -> WriteEntry:
    data = DATA[(begin - 2) * LAYER : (end - 2) * LAYER]
    fields = {
        "page": PAGE,
        "generation": GENERATION,
        "layer_begin": begin,
        "layer_end": end,
        "checksums": layer_checksums(memoryview(data), LAYER) if data else b"",
        "source_offset": 1 << 33,
    }
    return WriteEntry(**{**fields, **changed})  # type: ignore[arg-type]


def write(*entries: WriteEntry, transfer_id: int = 1, grant_id: int = GRANT, **changed: object) -> bytes:
    payload = b"".join(DATA[(e.layer_begin - 2) * LAYER : (e.layer_end - 2) * LAYER] for e in entries)
    message = Write(transfer_id, grant_id, list(entries), **changed)  # type: ignore[arg-type]
    return encode_frame(message, len(payload)) + payload


def head(data: bytes) -> bytes:
    """Without the payload."""
    return data[: 8 + int.from_bytes(data[:4], "little")]


@pytest.mark.parametrize("entries", [[entry()], [entry(5, 6), entry(2, 3)], [entry(3, 5)]])
def test_a_granted_write_is_there_and_answered_before_it_is_read(
    side: Side, entries: list[WriteEntry]
) -> None:
    data = write(*entries)
    side.far.sendall(data)
    assert side.receive() == head(data)
    assert side.answered() == ANSWER
    assert side.direct.take_num_answered() == len(ANSWER)
    views = [side.layers(PAGE, e.layer_begin - 2, e.layer_end - 2) for e in entries]
    for view, each in zip(views, entries, strict=True):
        assert view == DATA[(each.layer_begin - 2) * LAYER : (each.layer_end - 2) * LAYER]
    placed = side.direct.take(views, LAYER)
    assert placed is not None
    assert placed.checksums == [e.checksums for e in entries]
    assert placed.arriving is None
    assert side.direct.take(views, LAYER) is None


def test_what_follows_a_write_is_left_to_be_read(side: Side) -> None:
    first, after = write(entry(2, 3)), write(entry(3, 4)) + encode_frame(FetchDone())
    side.far.sendall(first + after)
    ahead = side.receive()
    assert ahead.startswith(head(first))
    rest = ahead[len(head(first)) :]
    assert rest == after[: len(rest)]
    assert side.layers(PAGE, 1, 4) == bytes(3 * LAYER)


@pytest.mark.parametrize("num_there", [0, 1, LAYER - 1, LAYER, 2 * LAYER + 100, 4 * LAYER - 1])
def test_of_a_write_that_comes_slowly_the_rest_is_left(side: Side, num_there: int) -> None:
    data = write(entry(2, 4), entry(4, 6))
    begin = len(head(data))
    side.far.sendall(data[: begin + num_there])
    assert side.receive() == head(data)
    assert side.answered() == b""
    views = [side.layers(PAGE, 0, 2), side.layers(PAGE, 2, 4)]
    placed = side.direct.take(views, LAYER)
    assert placed is not None
    assert placed.arriving is not None
    num_full = len(placed.checksums)
    begin += num_full * 2 * LAYER + placed.arriving.num_there
    for view in views[num_full:]:
        missing = len(view) - (placed.arriving.num_there if view is views[num_full] else 0)
        view[len(view) - missing :] = data[begin : begin + missing]
        begin += missing
    placed.arriving.advance(2 * LAYER)
    assert placed.arriving.packed() == entry(2 + 2 * num_full, 4 + 2 * num_full).checksums
    assert side.layers(PAGE, 0, 4) == DATA


def test_damaged_bytes_are_not_answered(side: Side) -> None:
    data = bytearray(write(entry()))
    data[-1] ^= 1
    side.far.sendall(data)
    assert side.receive() == head(bytes(data))
    assert side.answered() == b""
    assert side.direct.take_num_answered() == 0
    placed = side.direct.take([side.layers(PAGE, 0, 4)], LAYER)
    assert placed is not None
    assert placed.checksums != [entry().checksums]


def test_nothing_is_said_before_what_waits_to_be_said(side: Side) -> None:
    side.far.sendall(write(entry()))
    side.receive(may_answer=False)
    assert side.answered() == b""
    assert side.layers(PAGE, 0, 4) == DATA


LEFT_ALONE: dict[str, bytes] = {
    "another grant": write(entry(), grant_id=GRANT + 1),
    "another page": write(entry(page=PAGE + 1)),
    "no page": write(entry(page=NUM_PAGES)),
    "a negative page": write(entry(page=-1)),
    "a page out of all bounds": write(entry(page=(1 << 63) + PAGE)),
    "another generation": write(entry(generation=GENERATION + 1)),
    "layers before the first": write(entry(layer_begin=1, layer_end=5)),
    "layers after the last": write(entry(layer_begin=3, layer_end=7)),
    "layers in the wrong order": write(entry(layer_begin=6, layer_end=2)),
    "some heads": write(entry(), heads=(0, 1)),
    "placed already": write(entry(), is_placed=True),
    "checksums missing": write(entry(checksums=bytes(24))),
    "the same layers twice": write(entry(2, 4), entry(3, 5)),
    "no entries": encode_frame(Write(1, GRANT, []), 100) + bytes(100),
    "fewer bytes": encode_frame(Write(1, GRANT, [entry()]), LAYER) + DATA[:LAYER],
    "more bytes": encode_frame(Write(1, GRANT, [entry()]), 5 * LAYER) + DATA + DATA[:LAYER],
    "one good entry, one bad": write(entry(2, 3), entry(3, 4, page=PAGE + 1)),
    "another kind": encode_frame(Found([FoundBlock(0, entry().checksums, 0)]), len(DATA)) + DATA,
}


@pytest.mark.parametrize("data", LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_what_the_tables_do_not_let_pass_is_left_alone(side: Side, data: bytes) -> None:
    side.far.sendall(data)
    assert side.receive() == data
    assert side.answered() == b""
    assert side.is_untouched
    assert side.direct.take([side.memory], LAYER) is None


def test_layers_are_taken_once_and_again_when_they_did_not_come(side: Side) -> None:
    side.pages.take(PAGE, range(1, 2))
    side.far.sendall(write(entry(3, 4)))
    assert len(side.receive()) == len(write(entry(3, 4)))
    assert side.is_untouched
    side.pages.release(PAGE, range(1, 2))
    side.far.sendall(write(entry(3, 4)))
    side.receive()
    assert side.answered() == ANSWER
    side.pages.close(PAGE)
    side.far.sendall(write(entry(4, 5)))
    side.receive()
    assert side.answered() == b""


def test_a_transfer_is_new_or_open_for_this_grant(side: Side) -> None:
    def is_let_in(transfer_id: int) -> bool:
        side.far.sendall(write(entry(2, 3), transfer_id=transfer_id))
        side.receive()
        return side.answered() == ANSWER

    transfers = side.transfers
    transfers.open(5, GRANT)
    transfers.open(6, GRANT + 1)
    transfers.name(9)
    assert [is_let_in(number) for number in (4, 5, 6, 7, 9, 10, 69)] == [
        False,
        True,
        False,
        False,
        False,
        True,
        True,
    ]
    transfers.open(5 + 64, GRANT)  # takes its place
    assert not is_let_in(5)
    transfers.close(5)
    assert is_let_in(5 + 64)
    transfers.close(5 + 64)
    assert not is_let_in(5 + 64)
    for number in range(100, 107):
        transfers.open(number, GRANT)
    assert not is_let_in(200)  # as many are open as may be
    transfers.close(100)
    assert is_let_in(200)
    for strange in (-1, 1 << 63, (1 << 64) - 1):
        transfers.open(strange, GRANT)
    assert not is_let_in((1 << 63) - 1)


@pytest.mark.parametrize("before", [Close(1, None), FetchDone()])
def test_good_news_does_not_keep_a_write_back(side: Side, before: Message) -> None:
    side.far.sendall(encode_frame(before) + write(entry()))
    assert side.receive() == encode_frame(before) + head(write(entry()))
    assert side.answered() == ANSWER


@pytest.mark.parametrize("before", [Close(1, "given up"), Open(1, 2, "ref"), WriteAck()])
def test_a_write_behind_anything_else_waits(side: Side, before: Message) -> None:
    data = encode_frame(before) + write(entry())
    side.far.sendall(data)
    assert side.receive() == data
    assert side.is_untouched


def test_an_answer_goes_where_it_is_expected(side: Side) -> None:
    direct = DirectPlacement.where_it_can_be()
    assert direct is not None
    side.direct = direct
    found = encode_frame(Found([FoundBlock(0, entry().checksums, 0)]), len(DATA)) + DATA
    side.far.sendall(found)
    assert side.receive(may_answer=False) == found
    view = side.layers(PAGE, 0, 4)
    direct.expect(view, LAYER)
    side.far.sendall(found)
    assert side.receive(may_answer=False) == head(found)
    placed = direct.take([view], LAYER)
    assert placed is not None
    assert placed.checksums == [entry().checksums]
    assert view == DATA
    direct.expect(None)
    view[:] = bytes(len(view))
    side.far.sendall(found)
    assert side.receive(may_answer=False) == found
    assert side.is_untouched


class Asker:
    """Who asks the other end of a side, or sends it what is in `memory` from OFFSET on."""

    OFFSET = 1000

    def __init__(self, side: Side) -> None:
        direct = DirectPlacement.where_it_can_be()
        assert direct is not None
        self.direct, self.side = direct, side
        self.memory = Memory(LAYOUT, 300)
        self.memory.fill(2)
        self.direct.ask(self.memory.source, ANSWER)
        side.near.setblocking(False)

    def ask(self, head: bytes, num_bytes: int = 0, others: int = -1, within_s: float = 0.0) -> bytes:
        """What is left to be read of what has come."""
        fd, buffer = self.side.near.fileno(), self.side.buffer
        _, num_ahead = self.direct.exchange(
            fd, buffer, others, within_s, head=head, offset=self.OFFSET, num_bytes=num_bytes
        )
        return bytes(buffer[:num_ahead])

    def block(self, num_bytes: int) -> memoryview:
        return self.memory.view[self.OFFSET : self.OFFSET + num_bytes]


@pytest.fixture
def asker(side: Side) -> Iterator[Asker]:
    asker = Asker(side)
    yield asker
    asker.memory.close()


MIDDLING = (16 << 10, 128 << 10)
"""bytes of the least and the largest block that is not copied on its way into the kernel"""


@pytest.mark.parametrize("num_bytes", [0, 1, MIDDLING[0] - 1, *MIDDLING, MIDDLING[1] + 1, 1 << 18])
def test_who_asks_hears_the_answer_in_the_same_call(side: Side, asker: Asker, num_bytes: int) -> None:
    side.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    side.far.send(ANSWER)
    asker.ask(b"the head", num_bytes)
    assert asker.direct.num_asked == 8 + num_bytes
    assert asker.direct.take_answer() == b""
    assert all_of(side.far) == b"the head" + asker.block(num_bytes)


@pytest.mark.parametrize("num_bytes", [1, MIDDLING[0] - 1, *MIDDLING, MIDDLING[1] + 1])
def test_of_a_middling_block_the_pages_themselves_leave(side: Side, asker: Asker, num_bytes: int) -> None:
    side.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    side.far.send(ANSWER)
    asker.ask(b"", num_bytes)
    before = bytes(asker.block(num_bytes))
    asker.memory.fill(3)
    is_middling = MIDDLING[0] <= num_bytes <= MIDDLING[1]
    assert all_of(side.far) == (asker.block(num_bytes) if is_middling else before)


def test_where_the_file_gives_no_pages_they_are_copied(side: Side, asker: Asker) -> None:
    asker.direct._placement.segment_fd = -1
    side.far.send(ANSWER)
    asker.ask(b"the head", MIDDLING[0])
    assert asker.direct.take_answer() == b""
    assert all_of(side.far) == b"the head" + asker.block(MIDDLING[0])


def test_what_the_file_does_not_give_is_left(side: Side, asker: Asker) -> None:
    os.truncate(asker.memory.fd, Asker.OFFSET + 5)
    side.far.send(ANSWER)
    with pytest.raises(BlockingIOError):
        asker.ask(b"the head", MIDDLING[0], within_s=10)
    assert asker.direct.num_asked == 13
    assert asker.direct.take_answer() is None


@pytest.mark.parametrize("heard", [ANSWER[:-1], ANSWER + ANSWER, encode_frame(FetchDone()), b"\0" + ANSWER])
def test_any_other_answer_is_left_to_be_read(side: Side, asker: Asker, heard: bytes) -> None:
    side.far.send(heard)
    assert asker.ask(b"the head", 7) == heard
    assert asker.direct.take_answer() is None


def test_of_a_request_that_the_kernel_does_not_take_the_rest_is_left(side: Side, asker: Asker) -> None:
    side.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    side.far.send(ANSWER)
    for num_bytes in (64 << 10, 1 << 20):
        with pytest.raises(BlockingIOError):
            asker.ask(b"the head", num_bytes, within_s=10)
        data = all_of(side.far)
        assert 0 < asker.direct.num_asked == len(data) < 8 + num_bytes
        assert (b"the head" + asker.block(num_bytes)).startswith(data)
        assert asker.direct.take_answer() is None
    assert side.near.recv(100) == ANSWER


def test_who_listens_for_an_answer_gives_up_for_others_and_hears_it_before_them(
    side: Side, asker: Asker
) -> None:
    other, speaker = socket.socketpair()
    with other, speaker:
        speaker.send(b"something")
        with pytest.raises(BlockingIOError):
            asker.ask(b"the head", 0, other.fileno(), within_s=3600)
        assert asker.direct.num_asked == 8
        side.far.send(ANSWER)
        asker.ask(b"the head", 0, other.fileno(), within_s=3600)
        assert asker.direct.take_answer() == b""


def test_the_block_that_was_asked_for_is_verified(side: Side, asker: Asker) -> None:
    view = side.layers(PAGE, 0, 4)
    good = encode_frame(Found([FoundBlock(0, entry().checksums, 1 << 40)]), len(DATA))
    others = [
        Found([FoundBlock(1, entry().checksums, 0)]),
        Found([FoundBlock(0, entry().checksums[:-8], 0)]),
        Found([FoundBlock(0, bytes(len(entry().checksums)), 0)]),
        Found([FoundBlock(0, entry().checksums, 0, 1)]),
        Found([FoundBlock(0, entry().checksums, 0)], "a failure"),
    ]
    for frame in [good, *(encode_frame(found, len(DATA)) for found in others)]:
        view[:] = bytes(len(view))
        asker.direct.expect(view, LAYER)
        side.far.send(frame + DATA)
        assert asker.ask(b"fetch") == frame
        assert view == DATA
        assert asker.direct.take_answer() == (entry().checksums if frame is good else None)
        assert (asker.direct.take([view], LAYER) is None) == (frame is good)
    asker.direct.expect(view, LAYER)
    side.far.send(ANSWER)  # nobody has written anything
    assert asker.ask(b"fetch") == ANSWER
    assert asker.direct.take_answer() is None
    side.far.send(encode_frame(FetchDone()) + good + DATA)  # nor may this be said here
    asker.ask(b"fetch")
    assert asker.direct.take_answer() is None


class Shelf:
    """Blocks that are sealed, each in the page of its number, at the other end of a side."""

    def __init__(self, side: Side, layout: KVLayout = LAYOUT) -> None:
        self.memory = Memory(layout, 40)
        self.memory.fill(1)
        for page in range(self.memory.num_pages):
            self.memory.shelve(key(page), page)
        source = self.memory.source
        catalogue = Catalogue.at(source.buffer, self.memory._shelves, layout)
        side.direct.let_in(side.pages, side.transfers, ANSWER, source, catalogue)
        side.near.setblocking(False)

    def found(self, pages: Sequence[int], layers: range) -> bytes:
        """The frame, and the blocks behind it."""
        memory = self.memory
        first_layer = memory.layout.first_layer
        positions = range(layers.start - first_layer, layers.stop - first_layer)
        blocks = [
            FoundBlock(index, memory.checksums(page, positions), memory.offset(page, positions.start))
            for index, page in enumerate(pages)
        ]
        payload = b"".join(memory.layers(page, positions) for page in pages)
        return encode_frame(Found(blocks), len(payload)) + payload


@pytest.fixture
def shelf(side: Side) -> Iterator[Shelf]:
    shelf = Shelf(side)
    yield shelf
    shelf.memory.close()


def all_of(sock: socket.socket) -> bytes:
    """That has come."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while piece := sock.recv(1 << 20):
            data += piece
    return data


@pytest.mark.parametrize("pages", [[3], [39, 0], list(range(20))])
@pytest.mark.parametrize("layers", [range(2, 6), range(4, 5)])
@pytest.mark.parametrize("before", [b"", encode_frame(FetchDone())])
def test_a_fetch_of_sealed_blocks_is_answered_before_it_is_read(
    side: Side, shelf: Shelf, pages: list[int], layers: range, before: bytes
) -> None:
    fetch = encode_frame(Fetch([key(page) for page in pages], layers.start, layers.stop))
    side.far.sendall(before + fetch)
    assert side.receive() == before + fetch
    found = shelf.found(pages, layers)
    assert all_of(side.far) == found
    assert side.direct.is_ahead
    assert side.direct.take_sent() == (head(found), len(found))
    assert side.direct.take_sent() is None
    assert not side.direct.is_ahead


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_a_block_of_any_size_is_the_answer(side: Side, num_layers: int) -> None:
    layout = KVLayout(num_layers=4, num_kv_heads=1, head_dim=64, block_size=256, dtype="bfloat16")
    assert MIDDLING[1] < 4 * layout.layer_bytes
    shelf = Shelf(side, layout)
    side.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    side.far.sendall(encode_frame(Fetch([key(5)], 0, num_layers)))
    side.receive()
    found = shelf.found([5], range(num_layers))
    assert all_of(side.far) == found
    assert side.direct.take_sent() == (head(found), len(found))
    shelf.memory.close()


@pytest.mark.parametrize(
    "fetch",
    [
        Fetch([key(1), key(99)], 2, 6),
        Fetch([key(1)[:-1]], 2, 6),
        Fetch([], 2, 6),
        Fetch([key(1)] * 65, 2, 3),
        Fetch([key(1)], 1, 6),
        Fetch([key(1)], 2, 7),
        Fetch([key(1)], 3, 3),
        Fetch([key(1)], -1, 4),
        Fetch([key(1)], 2, 6, heads=(0, 1)),
        Fetch([key(1)], 2, 6, is_read=True),
        Fetch([key(7)], 2, 6),
    ],
)
def test_a_fetch_of_anything_else_is_left_to_be_read(side: Side, shelf: Shelf, fetch: Fetch) -> None:
    shelf.memory.unshelve(7)
    side.far.sendall(encode_frame(fetch))
    assert side.receive() == encode_frame(fetch)
    assert all_of(side.far) == b""
    assert side.direct.take_sent() is None


def test_a_fetch_is_not_answered_before_what_waits_to_be_said(side: Side, shelf: Shelf) -> None:
    side.far.sendall(encode_frame(Fetch([key(1)], 2, 6)))
    side.receive(may_answer=False)
    assert side.direct.take_sent() is None
    assert all_of(side.far) == b""


def test_of_an_answer_that_the_kernel_does_not_take_the_rest_is_left(side: Side, shelf: Shelf) -> None:
    side.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    pages = list(range(40))
    side.far.sendall(encode_frame(Fetch([key(page) for page in pages], 2, 6)))
    side.receive()
    sent, found = side.direct.take_sent(), shelf.found(pages, range(2, 6))
    assert sent is not None
    assert sent.head == head(found)
    assert 0 < sent.num_bytes < len(found)
    assert all_of(side.far) == found[: sent.num_bytes]


def test_mutated_frames_touch_nothing_that_is_not_granted(side: Side) -> None:
    rng = random.Random(4)
    frames = [
        write(entry()),
        write(entry(2, 4), entry(4, 6)),
        encode_frame(Close(1, None)) + write(entry(3, 4)),
    ]
    num_answered = 0
    for _ in range(3000):
        data = bytearray(rng.choice(frames))
        for _ in range(rng.choice([0, 1, 1, 2, 8])):
            place = rng.randrange(min(len(data), 200))
            match rng.randrange(3):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    del data[place : place + rng.randrange(1, 9)]
                case 2:
                    data[place:place] = rng.randbytes(rng.randrange(1, 9))
        side.far.sendall(data)
        side.receive()
        if side.answered():
            num_answered += 1
        page = PAGE * STRIDE
        assert not any(side.memory[:page])
        assert not any(side.memory[page + LAYOUT.block_bytes :])
        side.memory[page : page + LAYOUT.block_bytes] = bytes(LAYOUT.block_bytes)
        side.direct.take_num_answered()
        side.near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            side.near.recv(1 << 20)
    assert 300 < num_answered < 2000
