"""The link from a stage to the next stage, or from the first rank of a group to another rank.

Owns: the link (this side listens), flow control of passes. Does not know: prompts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
import torch

from mooncake.bus.zeromq import PeerGoneError, Router
from mooncake.errors import MismatchError
from mooncake.messages.pools import Capacity, PoolShard, PoolStats
from mooncake.messages.workers import PROTOCOL_VERSION
from mooncake.node.process import Progress, report
from mooncake.node.process_config import WorkerProcess
from mooncake.security.keys import ClusterKey
from workers.errors import SessionLostError
from workers.groups.rank_messages import CallDone, FromFollower, RankAnswer, RankCallFailed
from workers.groups.stage_messages import (
    AboutJob,
    ChunkRange,
    HiddenStates,
    Pass,
    PassTaken,
    StageAlive,
    StageBeat,
    StageHello,
    StageRefused,
    StageWelcome,
)
from workers.groups.stage_pulse import LinkPulse

_PASSES_AHEAD = 2
"""The most passes that have been sent and that the next stage has not begun.

With one pass in flight and another that has arrived, the next stage always has a pass to compute.
"""
_MOST_BYTES = 4 << 20
"""The most bytes of hidden states in one message."""


def next_stage_of(process: WorkerProcess, fingerprint: str) -> "NextStage | None":
    """Return a worker's link to the next stage; None for the last stage.

    The link listens for the next stage.
    """
    stage = process.stage
    if stage.number + 1 == stage.num_stages:
        return None
    return NextStage(
        stage.listens_at,
        process.cluster_key,
        stage=stage.number + 1,
        num_stages=stage.num_stages,
        fingerprint=fingerprint,
        timeout_s=process.config.conductor.peer_timeout_s,
    )


class NextStage:
    """The link to the next stage. `join` must return before `run` and `beat` run as tasks."""

    def __init__(
        self,
        endpoint: str,
        key: ClusterKey,
        *,
        stage: int,
        num_stages: int,
        fingerprint: str,
        timeout_s: float,
        kind: str = "stage",
    ) -> None:
        """Listen for stage number `stage`, which counts as lost after `timeout_s` seconds of silence.

        `kind` is the peer's name in errors and progress reports: "stage" or "rank".
        """
        self._router: Router[FromFollower] = Router(endpoint, FromFollower, key)
        self.stage, self._num_stages, self._fingerprint = stage, num_stages, fingerprint
        self._kind, self._name = kind, f"{kind} {stage}"
        self._pulse = LinkPulse(self._name, timeout_s)
        self._peer: bytes | None = None
        self._num_ahead = 0
        self._taken = asyncio.Event()
        self.capacity: Capacity
        """The least capacity of the next stage and all later stages, for each field separately.

        Set by `join`.
        """
        self.engine: str
        """The engines of the next stage and all later stages, as text. Set by `join`."""
        self.shards: tuple[PoolShard, ...]
        """The pool parts of the next stage and all later stages. Set by `join`."""
        self.pools: dict[str, PoolStats] = {}
        """The latest counters of the pools of the next stage and all later stages, by messenger name."""

    @property
    def endpoint(self) -> str:
        """The address to which the next stage connects."""
        return self._router.endpoint

    def close(self) -> None:
        """Close the link.

        The next stage notices this at its next beat, or when it has heard nothing for its timeout.
        """
        self._router.close()

    async def join(self) -> None:
        """Wait until the next stage has joined.

        A stage of another release, model or pipeline is refused, and the wait goes on.
        """
        report(Progress(f"waiting for {self._name} at {self.endpoint}", 0, 0))
        while self._peer is None:
            sender, message = await self._router.recv()
            if not isinstance(message, StageHello):
                await self._answer(sender, StageAlive(known=False))
                continue
            if await self._refuses(sender, message):
                continue
            await self._answer(sender, StageWelcome())
            self._peer = sender
            self.capacity, self.engine, self.shards = message.capacity, message.engine, message.shards

    async def run(
        self,
        hear: Callable[[AboutJob], Awaitable[None]],
        on_answer: Callable[[RankAnswer], None] | None = None,
    ) -> None:
        """Receive and handle messages until the next stage is lost.

        `hear` gets the reports about prompts. `on_answer` gets a rank's answers to calls.

        Raises `SessionLostError` when the stage is lost or has restarted its session.
        """
        while True:
            sender, message = await self._router.recv()
            if sender != self._peer:
                if not isinstance(message, StageHello):
                    await self._answer(sender, StageAlive(known=False))
                elif not await self._refuses(sender, message):
                    raise SessionLostError(f"{self._name} has begun anew")
                continue
            self._pulse.heard()
            match message:
                case StageHello():
                    await self.send(StageWelcome())  # the hello was sent before the first answer arrived
                case StageBeat(pools=pools):
                    self.pools = pools
                case PassTaken():
                    self._num_ahead -= 1
                    self._taken.set()
                case CallDone() | RankCallFailed():
                    if on_answer is None:
                        raise SessionLostError(f"{self._name} answers what nobody has asked")
                    on_answer(message)
                case _:
                    await hear(message)

    async def beat(self) -> None:
        """Send beats until the stage is lost.

        Raises `SessionLostError` when the stage is lost or silent for too long.
        """
        await self._pulse.beat(lambda: self.send(StageAlive(known=True)))

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises `SessionLostError` when the stage is lost."""
        assert self._peer is not None
        try:
            await self._router.send(self._peer, message)
        except PeerGoneError as error:
            raise SessionLostError(f"{self._name} is gone: {error}") from None

    async def compute(self, ranges: Sequence[ChunkRange], hidden: torch.Tensor) -> None:
        """Send a pass, and wait until the next stage can take another one.

        `hidden` are the states [T, hidden_size] of the tokens in `ranges`, contiguous and on the CPU, in the
        model's dtype.
        """
        data = memoryview(hidden.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        await self.send(Pass(list(ranges), len(data), bytes(data[:_MOST_BYTES])))
        for start in range(_MOST_BYTES, len(data), _MOST_BYTES):
            await self.send(HiddenStates(bytes(data[start : start + _MOST_BYTES])))
        self._num_ahead += 1
        while self._num_ahead >= _PASSES_AHEAD:
            self._taken.clear()
            await self._taken.wait()

    async def _refuses(self, sender: bytes, hello: StageHello) -> bool:
        """Refuse a stage whose hello does not match this side's. Returns whether the stage was refused."""
        try:
            self._check(hello)
        except MismatchError as error:
            await self._answer(sender, StageRefused(str(error)))
            return True
        return False

    def _check(self, hello: StageHello) -> None:
        for what, ours, theirs in (
            ("protocol version", PROTOCOL_VERSION, hello.protocol_version),
            (f"number of {self._kind}s", self._num_stages, hello.num_stages),
            (self._kind, self.stage, hello.stage),
            ("model fingerprint", self._fingerprint, hello.fingerprint),
        ):
            if ours != theirs:
                raise MismatchError(
                    what, ours, theirs, f"start all {self._kind}s with the same release and configuration"
                )

    async def _answer(self, sender: bytes, message: msgspec.Struct) -> None:
        """Send a message, which is dropped if the peer is gone."""
        try:
            await self._router.send(sender, message)
        except PeerGoneError:
            return


class Behind(Protocol):
    """The interface of a link to the later stages, or of the links to the other ranks."""

    @property
    def capacity(self) -> Capacity: ...
    @property
    def engine(self) -> str: ...
    @property
    def shards(self) -> tuple[PoolShard, ...]: ...


def least_capacity(capacity: Capacity, behind: Behind | None) -> Capacity:
    """Return the least capacity of a stage and all later stages, or of all ranks, for each field separately.

    A prompt needs as many pages in each stage or rank, so the least capacity is its limit. `behind` is None
    in the last stage, and without a group.
    """
    if behind is None:
        return capacity
    return Capacity(
        min(capacity.num_pool_pages, behind.capacity.num_pool_pages),
        min(capacity.num_device_pages, behind.capacity.num_device_pages),
        min(capacity.max_batch, behind.capacity.max_batch),
    )


def shards_of(shard: PoolShard, behind: Behind | None) -> tuple[PoolShard, ...]:
    """Return the pool shards of a stage and all later stages, or of all ranks."""
    return (shard,) if behind is None else (shard, *behind.shards)


def engines_of(engine: str, behind: Behind | None) -> str:
    """Return the engines of a stage and all later stages, or of all ranks, as text."""
    return engine if behind is None else f"{engine} + {behind.engine}"
