"""A worker's calls to its messenger and their answers, as many at a time as there are tasks that ask.

Owns: the connection, what is under way, whether the messenger is there. Does not know: what is asked for.
"""

import asyncio
import itertools
from collections.abc import Callable

from kvstore.protocol.answers import Answer, CallFailed, Detached, ErrorKind, FromPool, LayersFetched
from kvstore.protocol.calls import Call, Notice, PinBlocks, Waiting
from kvstore.protocol.channel import Channel
from kvstore.protocol.failures import error_of
from mooncake.errors import PoolError

ADVICE = "this worker and its messenger's pool must agree"
_ANSWER_TIMEOUT_S = 10.0
"""for calls that a working messenger answers at once"""


class WorkerCalls:
    """Over one connection. All raise PoolError once the messenger is gone, or does not answer in time."""

    def __init__(self, channel: "Channel[FromPool]", instance: str) -> None:
        self.closed = asyncio.Event()
        """set when the messenger is gone or has ended the session"""
        self.space_epoch = 0
        """of the messenger's pool, when it was full for us the last time"""
        self._channel = channel
        self._instance = instance
        self._gone_reason = f"messenger of {instance} gone"
        self._ids = itertools.count(1)
        self._under_way: dict[int, asyncio.Future[Answer]] = {}
        self._on_layers: dict[int, Callable[[int, int], None]] = {}
        """of fetches, by call"""
        self._has_ended = False
        self._reader = asyncio.create_task(self._read())

    def new_id(self) -> int:
        """For a call."""
        return next(self._ids)

    async def send(self, message: Call | Notice) -> None:
        """Returns when it has left."""
        if self.closed.is_set():
            raise PoolError(self._gone_reason)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._channel.send(message)
        except ConnectionError as error:
            raise PoolError(self._gone_reason) from error
        except TimeoutError:
            raise self._stalled() from None

    async def ask(self, call: Call, on_layers: Callable[[int, int], None] | None = None) -> Answer:
        """Its answer; what the messenger could not do is raised. `on_layers` hears of a fetch on its way."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._under_way[call.call_id] = answered
        if on_layers is not None:
            self._on_layers[call.call_id] = on_layers
        try:
            await self.send(call)
            waits = isinstance(call, Waiting | PinBlocks)  # what is pinned comes from disk first
            async with asyncio.timeout(None if waits else _ANSWER_TIMEOUT_S):
                answer = await answered
        except TimeoutError:
            raise self._stalled() from None
        finally:
            del self._under_way[call.call_id]
            self._on_layers.pop(call.call_id, None)
        if isinstance(answer, CallFailed):
            if answer.kind is ErrorKind.POOL_FULL:
                self.space_epoch = answer.space_epoch
            raise error_of(answer, ADVICE)
        return answer

    async def close(self) -> None:
        """Detaches. Whoever waits for an answer gets a PoolError."""
        self._gone_reason = f"client of {self._instance} closed"
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._end()

    async def _read(self) -> None:
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, Detached):
                    self._gone_reason = f"messenger of {self._instance} ended the session: {message.reason}"
                    break
                if isinstance(message, LayersFetched):
                    on_layers = self._on_layers.get(message.call_id)
                    if on_layers is not None:
                        on_layers(message.num_blocks, message.num_layers)
                    continue
                answered = self._under_way.get(message.call_id)
                if answered is not None and not answered.done():  # else its caller was cancelled
                    answered.set_result(message)
        finally:
            self._end()

    def _stalled(self) -> PoolError:
        """A messenger that does not answer is as good as gone: what it holds for this worker must end."""
        self._gone_reason = f"messenger of {self._instance} did not answer within {_ANSWER_TIMEOUT_S:g} s"
        self.closed.set()
        self._reader.cancel()  # which ends the rest
        return PoolError(self._gone_reason)

    def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self.closed.set()
        self._channel.close()
        for answered in self._under_way.values():
            if not answered.done():
                answered.set_exception(PoolError(self._gone_reason))
                answered.exception()  # retrieved, should its caller be gone
