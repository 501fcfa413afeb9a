"""The follower of a vLLM server's KV events, which gets each batch once and in order.

Batches that were missed are requested again (a replay).

Owns: the sockets, replays. Does not know: the contents of events.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq
import zmq.asyncio

from kvstore.events.vllm import END_OF_REPLAY
from mooncake.messages.kv_events import KVStored
from mooncake.messages.pools import Tier
from workers.vllm.cached_blocks import CachedBlocks, Change

_REPLAY_S = 10.0
"""Seconds after which the rest of a replay is no longer awaited."""
Tell = Callable[[list[Change]], Awaitable[None]]


class KVEventFollower:
    """The KV events of one engine, over all sessions of its worker. Both endpoints are ipc endpoints.

    Needs a running event loop.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, block_size: int) -> None:
        self._endpoints = endpoint, replay_endpoint
        context = zmq.asyncio.Context.instance()
        self._live, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay.connect(replay_endpoint)
        self.blocks = CachedBlocks(block_size)

    def close(self) -> None:
        """Close the sockets, and remove the endpoints' files, which a killed engine leaves behind."""
        for socket in (self._live, self._replay):
            socket.close(linger=0)
        for endpoint in self._endpoints:
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    async def follow(self, tell: Tell) -> None:
        """Call `tell` with all cached blocks, then with each change, until cancelled."""
        await self._replayed()  # batches that were published before the subscription
        await tell([KVStored(Tier.DEVICE, self.blocks.keys)])
        while True:
            _, number, payload = await self._live.recv_multipart()
            sequence = int.from_bytes(number, "big")
            changes = self.blocks.receive(sequence, payload)
            if changes is None:
                changes = await self._replayed()
                if self.blocks.next_sequence < sequence:
                    changes += self.blocks.skip_to(sequence)
                changes += self.blocks.receive(sequence, payload) or []
            if changes:
                await tell(changes)

    async def _replayed(self) -> list[Change]:
        """Request the missing batches, apply them, and return the changes; empty if there is no answer."""
        await self._replay.send_multipart([b"", self.blocks.next_sequence.to_bytes(8, "big")])
        changes: list[Change] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPLAY_S):
                while True:
                    *_, number, payload = await self._replay.recv_multipart()
                    if number == END_OF_REPLAY:
                        break
                    sequence = int.from_bytes(number, "big")
                    if sequence > self.blocks.next_sequence:
                        changes += self.blocks.skip_to(sequence)  # vLLM does not keep older batches
                    changes += self.blocks.receive(sequence, payload) or []
        return changes
