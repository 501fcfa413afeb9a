"""Instances that compute nothing and answer at once, so that a front and a Conductor can be measured alone.

    mooncake-serve keygen cluster.key
    mooncake-serve --role conductor --security-key-file cluster.key
    python -m benchmarks.front.instant_workers --security-key-file cluster.key

The instances take the Conductor's endpoint, the model and the block size from the same flags and variables as
`mooncake-serve`. They register as prefill and decode instances, and send every message of a request. A first
token leaves when decode is ordered. Then every 20 ms all running requests get one token, in one message for
each front. The tokens repeat the prompt from its beginning.

Owns: the messages of both roles. Does not know: models, KVCache, pools.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mooncake.bus.zeromq import Dealer, peer_identity
from mooncake.config.settings import Config, leaf_keys, load_config
from mooncake.errors import ConfigError, MooncakeError
from mooncake.messages.blocks import KVLayout
from mooncake.messages.fronts import ToFront, TokenOutput, Tokens
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.pools import (
    Capacity,
    Grant,
    MessengerAddress,
    PeerStats,
    PoolShard,
    PoolStats,
    Tier,
    TierStats,
)
from mooncake.messages.requests import FinishReason, Held, HeldStep, Ref, Request
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    Decode,
    Finished,
    FromWorker,
    HeartbeatAck,
    Prefill,
    Prefilled,
    Register,
    Registered,
    RegisterRefused,
    Reserve,
    Reserved,
    Role,
    ToWorker,
)
from mooncake.model.checkpoint import kv_layout, open_checkpoint
from mooncake.security.keys import ClusterKey

INTERRUPTED = 130
STEP_S = 0.02
HEARTBEAT_S = 1.0
_NUM_PAGES = 1 << 24
_MAX_BATCH = 256
_NUM_NEIGHBOURS = 10


@dataclass(slots=True)
class _Running:
    """A running request; `num_tokens` of its answer have been sent."""

    request: Request
    num_tokens: int = 0

    def next_output(self, ref: Ref) -> TokenOutput:
        token_ids, position = self.request.token_ids[: self.request.num_prompt_tokens], self.num_tokens
        self.num_tokens += 1
        return TokenOutput(
            ref,
            position,
            [token_ids[position % len(token_ids)]],
            0,
            FinishReason.LENGTH if self.is_done else None,
        )

    @property
    def is_done(self) -> bool:
        return self.num_tokens >= self.request.sampling.max_tokens


def _idle_pool(layout: KVLayout, neighbours: Sequence[str]) -> PoolStats:
    """Return the statistics of an empty pool, with a sample of every metric that a real pool has."""
    tier = TierStats(num_slots=_NUM_PAGES, num_blocks=0, num_hits=0, num_evictions=0, num_checksum_failures=0)
    return PoolStats(
        num_pages=_NUM_PAGES,
        num_free=_NUM_PAGES,
        num_reserved=0,
        num_sealed=0,
        num_quarantined=0,
        num_used=0,
        num_reservations=0,
        num_leases=0,
        num_pins=0,
        block_bytes=layout.block_bytes,
        eviction_policy="lru",
        tiers=dict.fromkeys(Tier, tier),
        num_misses={"absent": 0, "evicted": 0},
        num_dropped=0,
        num_removed=0,
        num_demotions=0,
        num_promotions=0,
        num_expired_leases=0,
        num_checksum_failures=0,
        num_orphaned=0,
        sent_bytes={"tcp": 0},
        received_bytes={"tcp": 0},
        peers={name: PeerStats(0, None, 0, {"tcp": 0}, {"tcp": 0}, {"tcp": 0.0}) for name in neighbours},
    )


class InstantInstance:
    """An instance that connects, registers, and obeys orders until it is cancelled or refused."""

    def __init__(
        self,
        name: str,
        role: Role,
        fingerprint: str,
        layout: KVLayout,
        endpoint: str,
        key: ClusterKey,
        neighbours: Sequence[str],
    ) -> None:
        """Connect to the Conductor. Needs a running event loop.

        `neighbours` are the instances to which heartbeats report transfers.
        """
        incarnation = time.time_ns()
        self._key = key
        self._identity = peer_identity(name, incarnation)
        self._address = MessengerAddress(name, incarnation, "instant", "", ())
        self._registration = Register(
            PROTOCOL_VERSION,
            name,
            incarnation,
            role,
            fingerprint,
            layout,
            (PoolShard(self._address, layout),),
            Capacity(_NUM_PAGES, _NUM_PAGES, _MAX_BATCH),
            "nothing",
        )
        self._pool = _idle_pool(layout, neighbours)
        self._conductor: Dealer[ToWorker] = Dealer(endpoint, self._identity, ToWorker, key)
        self._fronts: dict[str, Dealer[ToFront]] = {}
        self._reserved: dict[Ref, Request] = {}
        self._running: dict[Ref, _Running] = {}
        self._epoch = 0
        """The epoch of the Conductor with which the instance registered last."""
        self.is_registered = asyncio.Event()

    async def run(self) -> None:
        """Register and carry out orders until cancelled. Raises ConfigError if the Conductor refuses."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                group.create_task(self._step())
                while True:
                    await self._obey(await self._conductor.recv())
        finally:
            self._conductor.close()
            for front in self._fronts.values():
                front.close()

    async def _obey(self, message: ToWorker) -> None:
        match message:
            case Reserve(ref, request):
                self._reserved[ref] = request
                await self._tell(Reserved(ref, Grant(0, self._address, [])))
                if message.inline:
                    await self._tell(Prefilled(ref, request.token_ids[0], 0))
                    await self._begin(ref)
            case Prefill(ref, request):
                await self._tell(Prefilled(ref, request.token_ids[0], 0))
            case Decode(ref) if ref in self._reserved:
                await self._begin(ref)
            case Abort(ref):
                self._reserved.pop(ref, None)
                self._running.pop(ref, None)
            case Registered(epoch):
                self._epoch = epoch
                self.is_registered.set()
            case HeartbeatAck(known=False):
                held = [Held(ref, HeldStep.DECODING) for ref in self._running]
                await self._tell(msgspec.structs.replace(self._registration, epoch=self._epoch, held=held))
            case RegisterRefused(reason):
                raise ConfigError(f"the conductor refused {self._registration.instance}: {reason}")

    async def _begin(self, ref: Ref) -> None:
        request = self._reserved.pop(ref)
        self._running[ref] = _Running(request, request.num_output_tokens)
        await self._advance([ref])

    async def _tell(self, message: FromWorker) -> None:
        await self._conductor.send(message)

    async def _beat(self) -> None:
        await self._tell(self._registration)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            pools = {self._address.instance: self._pool}
            await self._tell(Heartbeat(len(self._running), 0, _NUM_PAGES, pools))

    async def _step(self) -> None:
        """Send one token of each running request every `STEP_S` seconds."""
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + STEP_S, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            await self._advance(list(self._running))

    async def _advance(self, refs: list[Ref]) -> None:
        by_front: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for ref in refs:
            running = self._running[ref]
            by_front[running.request.reply_to].append(running.next_output(ref))
        for endpoint, outputs in by_front.items():
            await self._front(endpoint).send(Tokens(outputs))
        for ref in refs:
            if self._running[ref].is_done:
                num_tokens = self._running.pop(ref).num_tokens
                await self._tell(Finished(ref, FinishReason.LENGTH, num_tokens))

    def _front(self, endpoint: str) -> Dealer[ToFront]:
        if endpoint not in self._fronts:
            self._fronts[endpoint] = Dealer(endpoint, self._identity, ToFront, self._key)
        return self._fronts[endpoint]


async def serve(config: Config, num_prefill: int, num_decode: int) -> None:
    """Run these numbers of instances until cancelled. Raises ConfigError, ModelError."""
    if config.security.key_file is None:
        raise ConfigError("security.key_file: give the key that the conductor has")
    key = ClusterKey.load(config.security.key_file)
    checkpoint = open_checkpoint(config.model, config.load_format)
    dtype = checkpoint.dtype_of(config.dtype)
    block_size = config.kvcache.block_size
    fingerprint = checkpoint.fingerprint(dtype, block_size)
    layout = kv_layout(checkpoint, block_size, dtype)
    async with asyncio.TaskGroup() as group:
        prefill, decode = (
            [f"instant-{role.value}-{index}" for index in range(number)]
            for role, number in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode))
        )
        for role, names, others in ((Role.PREFILL, prefill, decode), (Role.DECODE, decode, prefill)):
            for index, name in enumerate(names):
                neighbours = [
                    others[(index + step) % len(others)] for step in range(min(_NUM_NEIGHBOURS, len(others)))
                ]
                instance = InstantInstance(
                    name, role, fingerprint, layout, config.conductor.endpoint, key, neighbours
                )
                group.create_task(instance.run())


def main() -> None:
    parser = argparse.ArgumentParser(description="Instances that compute nothing and answer at once.")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="default: 1")
    keys = [path for path in leaf_keys() if path not in {("num_prefill",), ("num_decode",)}]
    for path in keys:
        parser.add_argument("--" + "-".join(path).replace("_", "-"), dest="_".join(path), metavar="VALUE")
    options = parser.parse_args()
    flags = {path: value for path in keys if (value := getattr(options, "_".join(path))) is not None}
    ended_by: int | str | None = None
    try:
        asyncio.run(serve(load_config(None, os.environ, flags), options.prefill, options.decode))
    except* KeyboardInterrupt:
        ended_by = INTERRUPTED
    except* MooncakeError as errors:
        ended_by = f"error: {errors.exceptions[0]}"
    if ended_by is not None:  # not above: before Python 3.11.4 it would be wrapped in a group
        sys.exit(ended_by)


if __name__ == "__main__":
    main()
