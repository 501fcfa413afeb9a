"""A real messenger among peers, clients and strangers that send mutated frames.

Afterwards it is the same process, serves as before, holds nothing for the dead, has not grown, and no page
has changed but those that were granted, into which nothing has come but what was sent to them.
"""

import contextlib
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from kvstore.pool.pages import PageState
from kvstore.pool.segment import Segment
from kvstore.protocol import answers, calls
from messenger.wire.messages import Abandon, Close, Probe, Write, WriteAck
from messenger.wire.protocol import encode_frame
from mooncake.config.sections import MessengerConfig
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import Grant, GrantedPage, PoolStats
from tests.kvstore.by_hand import HandMadeSender, entry_for
from tests.kvstore.caller import Caller
from tests.kvstore.fuzzing import PeerFuzzer, Stranger, Target, checksums_of
from tests.kvstore.fuzzing_clients import ClientFuzzer
from tests.kvstore.liar import Liar
from tests.kvstore.mutations import Mutator
from tests.kvstore.nodes import (
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    SEGMENT_PAGE_BYTES,
    Node,
    block_bytes,
    prompt_keys,
)

NUM_SEGMENT_PAGES = 64
NUM_SEALED = 16
NUM_AT_ONCE = 12
FRAMES_BETWEEN_CHECKS = 20_000
MOST_GROWTH_BYTES = 10 << 20
"""of the process's own memory to its peak, after a warm-up: the first fifth"""
MOST_LATE_GROWTH_BYTES = 2 << 20
"""from the median of the first half of what follows to that of the second"""
LEAST_CHECKS = 20
"""for these medians to mean something: a short run is still warming up"""
SERIAL = 1000
Fuzzer = PeerFuzzer | Stranger | ClientFuzzer
PEER_KEY, CLIENT_KEY = prompt_keys(2, first_token=70_000)


class Watched:
    """A messenger, and what its memory must look like."""

    def __init__(self, node: Node) -> None:
        assert node.process is not None
        self.node = node
        self.pid = node.process.pid
        self.caller = Caller(node.socket_path, SERIAL)
        segment = Segment.open(node.segment_fd)
        assert segment is not None
        self.segment = segment
        self.table = segment.page_table()
        self.keys = prompt_keys(NUM_SEALED)
        self.target = Target.make(self.caller.address, node.socket_path, self.keys)
        self._pages = np.frombuffer(segment.buffer[segment.page_offset(0) :], np.uint64)
        self._pages = self._pages[: segment.num_pages * segment.page_stride // 8].reshape(
            segment.num_pages, -1
        )
        self._header = bytes(segment.buffer[: segment.header.table_offset])
        self._granted: set[int] = set()
        self._mark_all()
        self._seal_all()
        self.descriptors = descriptors(self.pid)

    def grant(self, num_pages: int) -> tuple[int, Grant] | None:
        """Pages that may be written from now on; and their reservation. None if there are none left."""
        keys = [random.randbytes(16) for _ in range(num_pages - 1)]
        reservation = self.caller.call(calls.ReservePages(self.caller.next_id(), keys, 1))
        if isinstance(reservation, answers.CallFailed):
            return None
        assert isinstance(reservation, answers.Reservation)
        granted = self.caller.call(calls.OpenGrant(self.caller.next_id(), reservation.reservation_id))
        assert isinstance(granted, answers.Granted)
        self._granted.update(page.page for page in granted.grant.pages)
        self.target.grants.append(granted.grant)
        del self.target.grants[:-8]
        return reservation.reservation_id, granted.grant

    def check(self) -> int:
        """While nobody speaks: everything that must hold. Returns the process's own bytes of memory."""
        assert self.node.process is not None
        assert (self.node.process.poll(), self.node.process.pid) == (None, self.pid), "the messenger has died"
        stats = self._until_unclaimed()
        assert (stats.integrity, stats.num_orphaned) == (None, 0)
        self._check_pages()
        assert self.caller.call(calls.RemoveBlocks(self.caller.next_id(), None))
        assert self._stats().num_free == self.segment.num_pages
        self._until(lambda: descriptors(self.pid) == self.descriptors, "descriptors leak")
        self._mark_all()
        self._seal_all()
        self._serves_a_peer()
        self._serves_a_client()
        return anonymous_bytes(self.pid)

    def _check_pages(self) -> None:
        """Nothing has come but to granted pages, and there only what was sent to them."""
        assert bytes(self.segment.buffer[: self.segment.header.table_offset]) == self._header
        layers, words = self.target.layers, np.sort(self._expected, axis=None)
        for page in range(self.segment.num_pages):
            changed = self._pages[page] != self._expected[page]
            if page not in self._granted:
                assert not changed.any(), f"page {page} was written without a grant"
                continue
            came = self._pages[page][changed]
            foreign = words[np.searchsorted(words, came).clip(max=words.size - 1)] == came
            assert not foreign.any(), f"page {page} has bytes of another"
            for layer in range(LAYOUT.num_layers if self.table.state(page) is PageState.SEALED else 0):
                # Clients may seal what they like under any checksum: that is none of these.
                sent = layers.get(self.table.checksums(page, range(layer, layer + 1)))
                assert sent is None or self.segment.layer_view(page, layer) == sent
        self._granted.clear()

    def _mark_all(self) -> None:
        """Every word of every page is another one."""
        marks = np.random.default_rng(7).integers(1 << 63, size=self._pages.shape, dtype=np.uint64)
        self._pages[:] = marks
        self._expected = marks

    def _seal_all(self) -> None:
        reservation = self.caller.call(calls.ReservePages(self.caller.next_id(), self.keys, 0))
        assert isinstance(reservation, answers.Reservation)
        checksums = b""
        for key, block in zip(self.keys, reservation.blocks, strict=True):
            data = b"".join(block_bytes(key, layer) for layer in range(LAYOUT.num_layers))
            self.segment.page_view(block.page)[:] = data
            self._expected[block.page] = self._pages[block.page]
            checksums += checksums_of(data)
        sealed = calls.SealBlocks(self.caller.next_id(), reservation.reservation_id, checksums)
        assert isinstance(self.caller.call(sealed), answers.Done)

    def _serves_a_peer(self) -> None:
        """One whole transfer by one who behaves."""
        reservation = self.caller.call(calls.ReservePages(self.caller.next_id(), [PEER_KEY], 0))
        assert isinstance(reservation, answers.Reservation)
        granted = self.caller.call(calls.OpenGrant(self.caller.next_id(), reservation.reservation_id))
        assert isinstance(granted, answers.Granted)
        sender = HandMadeSender(granted.grant.messenger)
        sender.open(granted.grant)
        for layer in range(LAYOUT.num_layers):
            sender.write(granted.grant, *entry_for(granted.grant, PEER_KEY, layer=layer))
            assert sender.receive() == WriteAck()
        sender.send(Close(1, None))
        arrived = calls.AwaitArrived(self.caller.next_id(), reservation.reservation_id)
        assert isinstance(self.caller.call(arrived), answers.Done)
        sender.sock.close()
        page = reservation.blocks[0].page
        for layer in range(LAYOUT.num_layers):
            assert self.segment.layer_view(page, layer) == block_bytes(PEER_KEY, layer)
        self._expected[page] = self._pages[page]
        self.caller.call(calls.Release(self.caller.next_id(), reservation.reservation_id))

    def _serves_a_client(self) -> None:
        """One who is new finds what is there."""
        with contextlib.closing(Caller(self.node.socket_path, SERIAL + 1)) as client:
            leased = client.call(calls.LeaseBlocks(client.next_id(), [*self.keys, PEER_KEY, CLIENT_KEY], 5.0))
            assert isinstance(leased, answers.Leased)
            assert [page is not None for page in leased.pages] == [True] * (NUM_SEALED + 1) + [False]

    def _stats(self) -> PoolStats:
        answer = self.caller.call(calls.GetStats(self.caller.next_id(), True))
        assert isinstance(answer, answers.Stats)
        return answer.stats

    def _until_unclaimed(self) -> PoolStats:
        def is_unclaimed() -> bool:
            stats = self._stats()
            return not (
                stats.num_reserved or stats.num_quarantined or stats.num_reservations or stats.num_leases
            )

        self._until(is_unclaimed, "pages are held for the dead")
        return self._stats()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            changed = descriptors(self.pid) ^ self.descriptors
            assert time.monotonic() < deadline_s, f"{what}: {changed} {self._stats()}"
            time.sleep(0.002)


def descriptors(pid: int) -> set[tuple[str, str]]:
    """Number and target of each."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add((number, os.readlink(f"/proc/{pid}/fd/{number}")))
    return found


def anonymous_bytes(pid: int) -> int:
    """Without what the process shares with others: segments."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def fuzz(watched: Watched, seed: int, *, num_frames: int, duration_s: float) -> dict[str, int]:
    """Sends until there were so many frames or seconds. Returns the frames by kind of their sender."""
    end_s = time.monotonic() + duration_s
    sent = dict.fromkeys(("PeerFuzzer", "ClientFuzzer", "Stranger"), 0)
    memory_bytes: list[int] = []
    number, next_check = 0, 2_000
    while sum(sent.values()) < num_frames and time.monotonic() < end_s:
        running: list[tuple[Fuzzer, Iterator[None], int | None]] = []
        first_number = number
        try:
            while running or sum(sent.values()) < next_check:
                while (
                    len(running) < NUM_AT_ONCE
                    and sum(sent.values()) < next_check
                    and time.monotonic() < end_s
                ):
                    number += 1
                    running.append(_begin(watched, Random(f"{seed} {number}")))
                if not running:
                    break
                fuzzer, conversation, reservation_id = running.pop(0)
                if next(conversation, StopIteration) is not StopIteration:
                    running.append((fuzzer, conversation, reservation_id))
                    continue
                sent[type(fuzzer).__name__] += fuzzer.num_frames
                if reservation_id is not None:
                    watched.caller.call(calls.Release(watched.caller.next_id(), reservation_id))
            memory_bytes.append(watched.check())
        except BaseException:
            print(f"seed {seed}, conversations {first_number + 1} to {number}, after {sent}")
            raise
        next_check = sum(sent.values()) + FRAMES_BETWEEN_CHECKS
    print(f"seed {seed}: {sum(sent.values())} mutated frames in {number} conversations: {sent}")
    print(f"own memory in KiB: {[num_bytes >> 10 for num_bytes in memory_bytes]}")
    settled = memory_bytes[len(memory_bytes) // 5 :]
    middle = len(settled) // 2
    assert max(settled) - settled[0] <= MOST_GROWTH_BYTES
    if len(settled) >= LEAST_CHECKS:
        growth_bytes = statistics.median(settled[middle:]) - statistics.median(settled[:middle])
        assert growth_bytes <= MOST_LATE_GROWTH_BYTES
    return sent


def _begin(watched: Watched, random: Random) -> tuple[Fuzzer, Iterator[None], int | None]:
    """Somebody new."""
    kind, fuzzer, reservation_id = random.random(), None, None
    if kind < 0.55:
        granted = watched.grant(random.randrange(1, 5))
        reservation_id, grant = granted if granted is not None else (None, None)
        fuzzer = PeerFuzzer(random, watched.target, grant)
    elif kind < 0.80:
        fuzzer = ClientFuzzer(random, watched.target)
    else:
        fuzzer = Stranger(random, watched.target)
    return fuzzer, fuzzer.converse(), reservation_id


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Watched]:
    """Its log goes to `capfd`."""
    monkeypatch.setenv("MOONCAKE_LOG_LEVEL", "error")
    node = Node(tmp_path, "fuzzed", NUM_SEGMENT_PAGES * SEGMENT_PAGE_BYTES + 3 * 4096, "auto")
    node.ack_timeout_s = 1.0
    with contextlib.closing(node):
        node.start()
        yield Watched(node)


@contextlib.contextmanager
def nothing_unforeseen(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Errors that nobody has foreseen end in the messenger's log."""
    try:
        yield
    finally:
        captured = capfd.readouterr()
        print(captured.out)
        unforeseen = [line for line in captured.err.splitlines() if "a connection is ended: " not in line]
        print("\n".join(unforeseen[:100]))
    assert "Traceback" not in captured.err


@pytest.mark.cluster
def test_mutated_frames_do_no_harm(watched: Watched, capfd: pytest.CaptureFixture[str]) -> None:
    with nothing_unforeseen(capfd):
        sent = fuzz(watched, seed=1, num_frames=1_000_000, duration_s=5.0)
    assert all(sent.values())


def lie(watched: Watched, seed: int, *, num_sends: int) -> int:
    """Sends blocks to somebody whose answers are mutated. Returns the number of these."""
    caller, random, num_frames = watched.caller, Random(seed), 0
    for number in range(num_sends):
        reserved = caller.call(calls.ReservePages(caller.next_id(), watched.keys[:4], 0))
        assert isinstance(reserved, answers.Reservation)
        with contextlib.closing(Liar()) as liar:
            grant = Grant(number, liar.address, [GrantedPage(index, index, 0) for index in range(4)])
            caller.call(calls.StartSend(caller.next_id(), reserved.reservation_id, grant, "to a liar"))
            num_frames += liar.meet(random, num_lanes=MessengerConfig().streams)
        sent = caller.call(calls.AwaitSent(caller.next_id(), reserved.reservation_id))
        assert isinstance(sent, answers.Done | answers.CallFailed), f"seed {seed}, send {number}: {sent}"
        caller.call(calls.Release(caller.next_id(), reserved.reservation_id))
        if isinstance(sent, answers.CallFailed):
            assert sent.kind is answers.ErrorKind.TRANSFER
    watched.check()
    return num_frames


@pytest.mark.cluster
def test_mutated_answers_end_sends_and_nothing_else(
    watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    with nothing_unforeseen(capfd):
        assert lie(watched, seed=4, num_sends=200) > 1000


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_million_mutated_frames_do_no_harm(watched: Watched, capfd: pytest.CaptureFixture[str]) -> None:
    with nothing_unforeseen(capfd):
        sent = fuzz(watched, seed=2, num_frames=1_000_000, duration_s=1500.0)
    assert sum(sent.values()) >= 1_000_000


@pytest.mark.cluster
def test_unformatted_messenger_survives_impossible_layouts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_LOG_LEVEL", "error")
    node = Node(tmp_path, "new", NUM_SEGMENT_PAGES * SEGMENT_PAGE_BYTES, "auto")
    with nothing_unforeseen(capfd), contextlib.closing(node):
        node.start()
        mutator = Mutator(Random(3))
        assert node.process is not None
        for sizes in [(1 << 53, 1, 1, 1), (1 << 53,) * 4, (1, 1, 1, 1 << 40), (2**63 - 1, 1, 1, 2**63 - 1)]:
            with contextlib.closing(Caller(node.socket_path, SERIAL, connects=False)) as caller:
                layout = KVLayout(*sizes, dtype="float32")
                answer = caller.call(calls.Connect(1, FINGERPRINT, layout, SERIAL, may_format=True))
                is_number = max(sizes) <= 1 << 53  # else not even its message can be read
                assert isinstance(answer, answers.CallFailed if is_number else answers.Detached), answer
        for _ in range(300):
            with contextlib.closing(Caller(node.socket_path, SERIAL, connects=False)) as caller:
                caller.send(mutator.fields(calls.Connect(1, None, None, SERIAL)))
                assert not isinstance(caller.receive(), answers.Connected)
        with contextlib.closing(Caller(node.socket_path, SERIAL)) as caller:
            assert isinstance(caller.call(calls.Lookup(caller.next_id(), [])), answers.Located)
        assert node.process.poll() is None


@pytest.mark.cluster
def test_backward_layers_in_a_complete_grant_are_refused(watched: Watched) -> None:
    granted = watched.grant(1)
    assert granted is not None
    grant = granted[1]
    sender = HandMadeSender(grant.messenger)
    for layer in range(LAYOUT.num_layers):
        sender.write(grant, *entry_for(grant, PEER_KEY, layer=layer))
        assert sender.receive() == WriteAck()
    entry, data = entry_for(grant, PEER_KEY)
    backward = msgspec.structs.replace(entry, layer_begin=3, layer_end=1)
    sender.send(Write(1, grant.grant_id, [backward, entry]), data)
    assert "are no layers" in str(sender.receive())
    sender.write(grant, entry, data)
    assert sender.receive() == WriteAck()
    sender.sock.close()
    watched.caller.call(calls.Release(watched.caller.next_id(), granted[0]))


@pytest.mark.cluster
def test_lanes_that_abandon_each_other_end(watched: Watched) -> None:
    session = bytes(16)
    lanes = [HandMadeSender(watched.caller.address, session=session, lane=lane) for lane in range(3)]
    for number, lane in enumerate(lanes):
        # Much is to be done before, so that each lane has the next one's number in hand when it is ended.
        lane.sock.sendall(encode_frame(Probe()) * 200 + encode_frame(Abandon((number + 1) % 3)))
    assert all(lane.is_dropped() for lane in lanes)
    for lane in lanes:
        lane.sock.close()
    watched.check()
