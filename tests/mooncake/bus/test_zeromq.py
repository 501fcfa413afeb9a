import asyncio
import select
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from conductor.effects import ToConductor
from mooncake.bus.zeromq import (
    LARGEST_MESSAGE_BYTES,
    MAX_IN_A_ROW,
    Dealer,
    PeerGoneError,
    Router,
    peer_identity,
)
from mooncake.errors import ConfigError
from mooncake.messages.fronts import Cancel
from mooncake.messages.requests import Ref
from mooncake.messages.workers import Abort, ToWorker
from mooncake.security.curve import LARGEST_FRAME_BYTES, use_key
from mooncake.security.keys import ClusterKey

ABORT = Abort(Ref(1, "r", 2))
WORKER = peer_identity("p0", 1)
KEY = ClusterKey.generate()


async def test_messages_arrive_with_their_senders_identity(tmp_path: Path) -> None:
    router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor, KEY)
    dealer: Dealer[ToWorker] = Dealer(router.endpoint, WORKER, ToWorker, KEY)
    await dealer.send(Cancel("r"))
    assert await router.recv() == (WORKER, Cancel("r"))
    await router.send(WORKER, ABORT)
    assert await dealer.recv() == ABORT
    router.close()
    dealer.close()


async def test_a_message_that_a_send_has_come_upon_wakes_whoever_waits_for_it(tmp_path: Path) -> None:
    """libzmq takes the descriptor's signal back then."""
    router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor, KEY)
    dealer: Dealer[ToWorker] = Dealer(router.endpoint, WORKER, ToWorker, KEY)
    await dealer.send(Cancel("r"))
    await router.recv()
    waiting = asyncio.create_task(dealer.recv())
    await asyncio.sleep(0)
    await router.send(WORKER, ABORT)
    # From here on the event loop does not turn before the signal has come and is gone.
    assert select.select([dealer], [], [], 5.0)[0]
    for _ in range(1_000_000):
        await dealer.send(Cancel("r"))
        if not select.select([dealer], [], [], 0)[0]:
            break
    else:
        pytest.fail("sending did not take the signal back")
    assert await waiting == ABORT
    router.close()
    dealer.close()


class FullSocket:
    """Has one more message whenever it is asked."""

    def getsockopt(self, _: int) -> int:
        return int(zmq.POLLIN)

    def recv_multipart(self, _: int) -> list[bytes]:
        return [WORKER, msgspec.msgpack.encode(Cancel("r"))]


async def test_messages_without_end_leave_others_their_turns(tmp_path: Path) -> None:
    router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor, KEY)
    socket = router._socket
    router._socket = FullSocket()  # type: ignore[assignment]
    turns = asyncio.create_task(take_turns(3))
    num_messages = 0
    while not turns.done() and num_messages < 10 * MAX_IN_A_ROW:
        await router.recv()
        num_messages += 1
    assert turns.done()
    router._socket = socket
    router.close()


async def take_turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_sending_to_an_unknown_or_earlier_peer_is_an_error(tmp_path: Path) -> None:
    router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor, KEY)
    with pytest.raises(PeerGoneError, match="Abort"):
        await router.send(WORKER, ABORT)
    dealer: Dealer[ToWorker] = Dealer(router.endpoint, peer_identity("p0", 2), ToWorker, KEY)
    await dealer.send(Cancel("r"))
    await router.recv()
    with pytest.raises(PeerGoneError):
        await router.send(WORKER, ABORT)
    router.close()
    dealer.close()


def in_frames(payload: bytes) -> list[bytes]:
    starts = range(0, len(payload), LARGEST_FRAME_BYTES)
    return [payload[start : start + LARGEST_FRAME_BYTES] for start in starts]


async def test_malformed_messages_are_counted_and_do_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor, KEY)
    sender = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    use_key(sender, KEY)
    sender.connect(router.endpoint)
    wrong_type = msgspec.msgpack.encode(ABORT)  # goes to workers, never to the conductor
    not_unicode = b"\x81\xa4type\xa4\xff\xff\xff\xff"
    deep = b"\x82\xa1x" + b"\x91" * 100_000 + b"\xc0\xa4type\xa6Cancel"
    long_tag = b"\x81\xa4type\xdb" + (1 << 17).to_bytes(4, "big") + b"A" * (1 << 17)
    malformed = (
        [b""],
        [b"\xff" * 100],
        [wrong_type],
        [b"a", b"b", b"c"],
        [not_unicode],
        in_frames(deep),
        in_frames(long_tag),
        in_frames(bytes(LARGEST_MESSAGE_BYTES + 1)),
    )
    for frames in malformed:
        await sender.send_multipart(frames)
    await sender.send(msgspec.msgpack.encode(Cancel("r")))
    assert (await router.recv())[1] == Cancel("r")
    assert sum(message.startswith("dropped a ") for message in caplog.messages) == len(malformed)
    assert "too long" in caplog.messages[-1]
    assert max(map(len, caplog.messages)) < 1000
    router.close()
    sender.close(linger=0)


async def test_endpoints_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    router: Router[ToConductor] = Router("tcp://127.0.0.1:*", ToConductor, KEY)
    with pytest.raises(ConfigError, match=router.endpoint):
        Router(router.endpoint, ToConductor, KEY)
    with pytest.raises(ConfigError, match="nonsense"):
        Dealer("nonsense", WORKER, ToWorker, KEY)
    router.close()


async def test_closed_router_frees_its_endpoint_at_once() -> None:
    router: Router[ToConductor] = Router("tcp://127.0.0.1:*", ToConductor, KEY)
    dealer: Dealer[ToWorker] = Dealer(router.endpoint, WORKER, ToWorker, KEY)
    for _ in range(5):
        await dealer.send(Cancel("r"))
        assert await router.recv() == (WORKER, Cancel("r"))
        router.close()
        router.close()
        router = Router(router.endpoint, ToConductor, KEY)
    router.close()
    dealer.close()


async def test_a_dealer_knows_that_its_connection_broke() -> None:
    router: Router[ToConductor] = Router("tcp://127.0.0.1:*", ToConductor, KEY)
    dealer: Dealer[ToWorker] = Dealer(router.endpoint, WORKER, ToWorker, KEY)
    await dealer.send(Cancel("r"))
    await router.recv()
    assert dealer.num_connections == 1
    router.close()
    router = Router(router.endpoint, ToConductor, KEY)
    while dealer.num_connections == 1:
        await asyncio.sleep(0.01)
    router.close()
    dealer.close()


async def test_message_that_no_router_takes_is_an_error(tmp_path: Path) -> None:
    router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor, KEY)
    dealer: Dealer[ToWorker] = Dealer(router.endpoint, WORKER, ToWorker, KEY)
    envelope_bytes = len(msgspec.msgpack.encode(Cancel("r" * (1 << 20)))) - (1 << 20)
    largest = Cancel("r" * (LARGEST_MESSAGE_BYTES - envelope_bytes))
    with pytest.raises(PeerGoneError, match=f"of {LARGEST_MESSAGE_BYTES + 1} bytes .* takes"):
        await dealer.send(Cancel(largest.request_id + "r"))
    await dealer.send(largest)
    assert await router.recv() == (WORKER, largest)
    router.close()
    dealer.close()
