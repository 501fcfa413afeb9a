import asyncio
from collections.abc import Awaitable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from mooncake.bus import Dealer, PeerGoneError, Router, peer_identity
from mooncake.errors import ConfigError
from mooncake.messages import Abort, Cancel, Ref, ToConductor, ToWorker

ABORT = Abort(Ref(1, "r", 2))
WORKER = peer_identity("p0", 1)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await test

    asyncio.run(bounded())


def test_messages_arrive_with_their_senders_identity(tmp_path: Path) -> None:
    async def test() -> None:
        router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor)
        dealer: Dealer[ToWorker] = Dealer(router.endpoint, WORKER, ToWorker)
        await dealer.send(Cancel("r"))
        assert await router.recv() == (WORKER, Cancel("r"))
        await router.send(WORKER, ABORT)
        assert await dealer.recv() == ABORT
        router.close()
        dealer.close()

    run(test())


def test_sending_to_an_unknown_or_earlier_peer_is_an_error(tmp_path: Path) -> None:
    async def test() -> None:
        router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor)
        with pytest.raises(PeerGoneError, match="Abort"):
            await router.send(WORKER, ABORT)
        dealer: Dealer[ToWorker] = Dealer(router.endpoint, peer_identity("p0", 2), ToWorker)
        await dealer.send(Cancel("r"))
        await router.recv()
        with pytest.raises(PeerGoneError):
            await router.send(WORKER, ABORT)
        router.close()
        dealer.close()

    run(test())


def test_malformed_messages_are_counted_and_do_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        router: Router[ToConductor] = Router(f"ipc://{tmp_path}/a", ToConductor)
        stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        stranger.connect(router.endpoint)
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
            [deep],
            [long_tag],
        )
        for frames in malformed:
            await stranger.send_multipart(frames)
        await stranger.send(msgspec.msgpack.encode(Cancel("r")))
        assert (await router.recv())[1] == Cancel("r")
        assert router.num_malformed == len(malformed)
        assert max(map(len, caplog.messages)) < 1000
        router.close()
        stranger.close(linger=0)

    run(test())


def test_endpoints_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    async def test() -> None:
        router: Router[ToConductor] = Router("tcp://127.0.0.1:*", ToConductor)
        with pytest.raises(ConfigError, match=router.endpoint):
            Router(router.endpoint, ToConductor)
        with pytest.raises(ConfigError, match="nonsense"):
            Dealer("nonsense", WORKER, ToWorker)
        router.close()

    run(test())
