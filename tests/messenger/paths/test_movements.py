"""What is told of the bytes to a peer, when all goes well and when it does not."""

import asyncio
from pathlib import Path

import pytest

from messenger.transport.transports import Transport
from mooncake.errors import TransferError
from tests.messenger.fabric import LARGE, fabric, until


@pytest.mark.parametrize("trouble", ["silence", "reset", "revocation"])
async def test_what_did_not_arrive_is_in_flight_no_more_and_says_nothing_of_the_path(
    tmp_path: Path, trouble: str
) -> None:
    async with fabric(tmp_path, LARGE, 12, streams=1, ack_timeout_s=0.3) as node:
        proxy = node.proxy()
        peer = await node.peer()
        node.pages.grant(1, range(8))
        await node.write(1, range(4), peer=peer)
        known = peer.throughput.bandwidth_bytes_per_s
        assert known is not None
        proxy.black_hole()
        write = asyncio.create_task(node.write(1, range(4, 8), peer=peer))
        await until(lambda: peer.throughput.pending_bytes == 4 * LARGE.block_bytes)
        if trouble == "reset":
            proxy.reset()
        elif trouble == "revocation":
            node.pages.revoke(1, "not wanted any more")
            proxy.heal()
        with pytest.raises(TransferError):
            await write
        await until(lambda: not peer.throughput.pending_bytes)
        assert peer.throughput.bandwidth_bytes_per_s == known
        arrived = 4 * LARGE.block_bytes
        assert node.sent.by_peer["receiver"].sent_bytes[Transport.TCP] == arrived
        assert node.received.received_bytes[Transport.TCP] == arrived
