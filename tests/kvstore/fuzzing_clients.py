"""Fuzzers that send wrong calls to a messenger as clients and workers of its own host (see `fuzzing`)."""

import select
import socket
import time
from collections.abc import Iterator
from random import Random

import msgspec

from kvstore.protocol import answers, calls
from mooncake.messages.blocks import KEY_BYTES
from mooncake.messages.pools import Grant, GrantedPage, MessengerAddress
from tests.kvstore.fuzzing import FLIGHT_FRAMES, Target, may_be_hung_up_on
from tests.kvstore.mutations import Mutator
from tests.kvstore.nodes import DEADLINE_S, FINGERPRINT, LAYOUT

_TO_POOL = msgspec.msgpack.Decoder(calls.ToPool)
_FROM_POOL = msgspec.msgpack.Decoder(answers.FromPool)


class ClientFuzzer:
    """A fuzzer that connects as a client or worker on the messenger's own host."""

    def __init__(self, random: Random, target: Target) -> None:
        self.num_frames = 0
        self._random = random
        self._mutator = Mutator(random)
        self._target = target
        self._call_ids: dict[int, int] = {}
        """The positions in the flight of calls whose ids were not mutated, by id."""
        self._reservation_id = 1
        self._lease_id = 1

    def converse(self) -> Iterator[None]:
        random = self._random
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, may_be_hung_up_on():
            sock.settimeout(DEADLINE_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * calls.MAX_MESSAGE_BYTES)
            sock.connect(self._target.socket_path)
            first: calls.Connect | calls.Attach = calls.Connect(1, FINGERPRINT, LAYOUT, random.randrange(8))
            if random.random() < 0.2:
                first = calls.Attach(1, "fuzzed", 1, FINGERPRINT, LAYOUT, 0)
            if random.random() < 0.2:
                self.num_frames += 1
                sock.send(self._mutator.fields(first))
                yield
            sock.send(msgspec.msgpack.encode(first))
            leftovers: list[bytes] = []
            for _ in range(random.randrange(1, 5)):
                packets, last_id = self._flight(leftovers)
                self._send(sock, packets)
                yield
                if not self._land(sock, last_id, len(packets) - 1):
                    return
            for _ in range(random.randrange(3)):
                valid = msgspec.msgpack.encode(self._message(0))
                leftovers.append(
                    random.choice((self._mutator.flipped(valid), valid[:-3], valid * 2, valid[1:]))
                )
            if leftovers and not _leaves_this_host(_decoded(last := random.choice(leftovers))):
                sock.send(last)
                self.num_frames += 1
                yield
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(calls.MAX_MESSAGE_BYTES):
                pass

    def _flight(self, leftovers: list[bytes]) -> tuple[list[bytes], int]:
        """Return packets that can be decoded, the last of which is answered, and the last call's id."""
        packets: list[bytes] = []
        self._call_ids.clear()
        for _ in range(self._random.randrange(1, FLIGHT_FRAMES)):
            call_id = self._random.getrandbits(40)
            packet = self._mutator.fields(self._message(call_id))
            message = _decoded(packet)
            if message is None:
                leftovers.append(packet[: calls.MAX_MESSAGE_BYTES])
                continue
            if _leaves_this_host(message) or len(packet) > calls.MAX_MESSAGE_BYTES:
                continue
            if getattr(message, "call_id", None) == call_id:
                self._call_ids[call_id] = len(packets)
            packets.append(packet)
        last_id = self._random.getrandbits(40)
        self._call_ids[last_id] = len(packets)
        return [*packets, msgspec.msgpack.encode(calls.Lookup(last_id, []))], last_id

    def _send(self, sock: socket.socket, packets: list[bytes]) -> None:
        """Send packets. Answers are read whenever the messenger does not read because of unread answers."""
        for packet in packets:
            deadline_s = time.monotonic() + DEADLINE_S
            while True:
                try:
                    sock.send(packet, socket.MSG_DONTWAIT)
                    break
                except BlockingIOError:
                    assert time.monotonic() < deadline_s, "the messenger does not read"
                    readable, _, _ = select.select([sock], [sock], [], DEADLINE_S)
                    if readable:
                        self._take(sock)

    def _land(self, sock: socket.socket, last_id: int, num_mutated: int) -> bool:
        """Read answers up to the last call's. Returns whether the session goes on."""
        num_read = 0
        try:
            while True:
                answer = self._take(sock)
                if isinstance(answer, answers.Detached):
                    num_read += 1
                    return False
                num_read = max(num_read, self._call_ids.get(answer.call_id, -1) + 1)
                if answer.call_id == last_id:
                    return True
        finally:
            self.num_frames += min(num_read, num_mutated)

    def _take(self, sock: socket.socket) -> answers.FromPool:
        packet = sock.recv(calls.MAX_MESSAGE_BYTES)
        if not packet:
            raise ConnectionResetError("the messenger has hung up")
        answer: answers.FromPool = _FROM_POOL.decode(packet)
        match answer:
            case answers.Reservation():
                self._reservation_id = answer.reservation_id
            case answers.Leased():
                self._lease_id = answer.lease_id
        return answer

    def _message(self, call_id: int) -> calls.ToPool:
        random = self._random
        keys = random.sample(self._target.keys, random.randrange(1, 5))
        keys += [random.randbytes(KEY_BYTES)] * random.randrange(2)
        # Ids are counted up, so what belongs to others is named too.
        reservation_id = self._reservation_id - random.choice((0, 0, 0, 1, 2, 5))
        checksums = random.randbytes(8 * LAYOUT.num_layers)
        choices: tuple[calls.ToPool, ...] = (
            calls.ReservePages(call_id, keys, random.randrange(2)),
            calls.ReservePages(call_id, [random.randbytes(KEY_BYTES)], 0),
            calls.AwaitSpace(call_id, random.randrange(3)),
            calls.Commit(reservation_id, 0, LAYOUT.num_layers, [random.randrange(64)], checksums),
            calls.SealBlocks(call_id, reservation_id, checksums),
            calls.DescribeTokens(reservation_id, 0, bytes(4 * LAYOUT.block_size)),
            calls.OpenGrant(call_id, reservation_id),
            calls.StartSend(call_id, reservation_id, self._bogus_grant(), "fuzz"),
            calls.AwaitSent(call_id, reservation_id),
            calls.AwaitArrived(call_id, reservation_id),
            calls.Release(call_id, reservation_id),
            calls.Release(call_id, reservation_id),
            calls.Lookup(call_id, keys),
            calls.LeaseBlocks(call_id, keys, random.choice((0.001, 60.0))),
            calls.EndLease(self._lease_id),
            calls.Prefetch(keys),
            calls.DropIdle(keys[:1]),
            calls.PinBlocks(call_id, keys, 60.0, random.random() < 0.5),
            calls.UnpinBlocks(call_id, keys),
            calls.RemoveBlocks(call_id, keys[:1]),
            calls.ListBlocks(call_id, 0, 4),
            calls.VerifyBlocks(call_id, keys[:1]),
            calls.GetStats(call_id, False),
        )
        return random.choice(choices)

    def _bogus_grant(self) -> Grant:
        """Return a grant of no messenger, so that no connection to its address lasts."""
        random = self._random
        places = (*self._target.address.tcp_endpoints, ("127.0.0.1", 1), ("127.0.0.1", -1), ("", 70000))
        path = random.choice((self._target.address.unix_path, "", "\0", "/" + "x" * 200, "/dev/null"))
        address = MessengerAddress("nobody", 1, self._target.address.host_id, path, (random.choice(places),))
        return Grant(random.getrandbits(63), address, [GrantedPage(0, 0, 0)])


def _decoded(packet: bytes) -> calls.ToPool | None:
    try:
        message: calls.ToPool = _TO_POOL.decode(packet)
    except (msgspec.MsgspecError, ValueError):
        return None
    return message


def _leaves_this_host(message: calls.ToPool | None) -> bool:
    """Return whether a message would make the messenger send to other hosts or look up names."""
    if not isinstance(message, calls.StartSend):
        return False
    return any(host not in ("127.0.0.1", "") for host, _ in message.grant.messenger.tcp_endpoints)
