"""The link from a stage to the previous stage, or from another rank of a group to the first rank.

Owns: the link (this side connects), the passes that arrive. Does not know: prompts.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from mooncake.bus.zeromq import Dealer, PeerGoneError
from mooncake.errors import ConfigError, TransferError
from mooncake.messages.block_orders import BlockOrder, DropCopies, Pin, Replicate, Unpin
from mooncake.messages.pools import PoolStats
from mooncake.security.keys import ClusterKey
from workers.errors import SessionLostError
from workers.groups.rank_messages import FromLeader, ToFollower
from workers.groups.stage_messages import (
    Begin,
    ChunkRange,
    End,
    HiddenStates,
    Pass,
    PassTaken,
    Recount,
    StageAlive,
    StageBeat,
    StageHello,
    StageRefused,
    StageWelcome,
)
from workers.groups.stage_pulse import LinkPulse


class IncomingPass:
    """A pass from the previous stage, with the part of its hidden states that has arrived."""

    def __init__(self, announced: Pass) -> None:
        self.ranges: list[ChunkRange] = announced.ranges
        self.hidden = bytearray(announced.num_bytes)
        self._num_bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether all hidden states have arrived."""
        return self._num_bytes == len(self.hidden)

    def take(self, data: bytes) -> None:
        """Append hidden states. Raises TransferError for more bytes than were announced."""
        end = self._num_bytes + len(data)
        if end > len(self.hidden):
            raise TransferError(f"a pass of {len(self.hidden)} bytes came with {end}")
        self.hidden[self._num_bytes : end] = data
        self._num_bytes = end


class PreviousStage:
    """The link to the previous stage.

    `beat` runs as a task beside `join` and `run`; `join` must return before `run`.
    """

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        key: ClusterKey,
        hello: StageHello,
        pools: Callable[[], Awaitable[dict[str, PoolStats]]],
        timeout_s: float,
        name: str = "the stage before",
    ) -> None:
        """Connect to the previous stage, which counts as lost after `timeout_s` seconds of silence.

        `pools` returns the pool counters for each beat. `name` is the other end's name in errors.
        """
        self._dealer: Dealer[FromLeader] = Dealer(endpoint, identity, FromLeader, key)
        self._hello, self._pools = hello, pools
        self._name = name
        self._pulse = LinkPulse(name, timeout_s)
        self._has_joined = False
        self._num_connections = 0
        """The number of connections that the socket had made when this stage joined.

        A larger number later shows that the connection was broken and made again.
        """
        self.passes: asyncio.Queue[IncomingPass] = asyncio.Queue()
        """Passes that have arrived and have not begun.

        The flow control of `NextStage` limits their number.
        """
        self._coming: IncomingPass | None = None

    def close(self, linger_s: float) -> None:
        """Close the link. Queued messages may still leave within `linger_s` seconds."""
        self._dealer.close(linger_s)

    async def beat(self) -> None:
        """Send hellos until one is answered, then beats.

        Raises `SessionLostError` if the other end is silent after it has answered.
        """
        await self._pulse.beat(self._say_that_it_is_here)

    async def _say_that_it_is_here(self) -> None:
        if self._has_joined:
            await self.send(StageBeat(await self._pools()))
        else:
            self._pulse.heard()  # the other end may not have begun yet
            await self.send(self._hello)

    async def join(self) -> None:
        """Wait until the previous stage has accepted this stage.

        Raises `ConfigError` if the previous stage refuses this stage.
        """
        while not self._has_joined:
            message = await self._dealer.recv()
            match message:
                case StageWelcome():
                    self._has_joined = True
                    self._num_connections = self._dealer.num_connections
                    self._pulse.heard()
                case StageRefused(message=reason):
                    raise ConfigError(f"{self._name} refused this one: {reason}")

    async def run(
        self,
        obey: Callable[[Begin | Recount | End], None],
        keep: Callable[[BlockOrder], None],
        follow: Callable[[ToFollower], None] | None = None,
    ) -> None:
        """Receive and handle messages until the other end is lost.

        `obey` gets orders about prompts, `keep` gets orders about blocks. `follow` gets the messages that
        only a rank receives.

        Raises `SessionLostError` when the other end has restarted its session, and when the connection was
        broken and made again: passes may be lost then.
        """
        while True:
            message = await self._dealer.recv()
            self._pulse.heard()
            match message:
                case StageAlive(known=False):
                    raise SessionLostError(f"{self._name} has begun anew")
                case _ if self._dealer.num_connections > self._num_connections:
                    raise SessionLostError(
                        f"the connection to {self._name} broke, which may have swallowed passes"
                    )
                case StageAlive():
                    pass
                case Pass(data=data):
                    self._coming = IncomingPass(message)
                    self._take(data)
                case HiddenStates(data=data):
                    self._take(data)
                case Begin() | Recount() | End():
                    obey(message)
                case Pin() | Unpin() | Replicate() | DropCopies():
                    keep(message)
                case StageWelcome() | StageRefused():
                    pass  # sent again, in answer to a late hello
                case _:
                    if follow is None:
                        raise SessionLostError(f"{self._name} sent {type(message).__name__} to no rank")
                    follow(message)

    async def taken(self) -> None:
        """Tell the previous stage that the oldest of `passes` begins."""
        await self.send(PassTaken())

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises `SessionLostError` when the other end takes no messages."""
        try:
            await self._dealer.send(message)
        except PeerGoneError as error:
            raise SessionLostError(str(error)) from None

    def _take(self, data: bytes) -> None:
        if self._coming is None:
            raise SessionLostError("hidden states came without a pass")
        try:
            self._coming.take(data)
        except TransferError as error:
            raise SessionLostError(str(error)) from None
        if self._coming.is_whole:
            self.passes.put_nowait(self._coming)
            self._coming = None
