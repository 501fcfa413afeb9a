"""The front's two links: the connection to the Conductor, and the socket to which workers send tokens.

Owns: the heartbeat with the Conductor, sending and receiving messages. Does not know: HTTP, text, what
happens to requests whose tokens are missing (`receptions`).

The heartbeat is `FrontHello`, answered by `ClusterState`. A new epoch in the answer means another Conductor,
which knows nothing of requests in flight and of context caches: the front reports them (`Resume`,
`KeepContext`). If the Conductor answers that it has given this front up in between, the requests in flight
fail. Each heartbeat names the requests in flight (`InFlight`), so that both sides see which messages were
lost with a connection.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from conductor.front.errors import GenerationFailedError, UnavailableError
from conductor.front.generation.conductor_errors import error_of
from conductor.front.generation.reception import Lost, Receive
from conductor.front.generation.receptions import Receptions
from mooncake.bus.zeromq import PeerGoneError, Router
from mooncake.endpoints import advertised
from mooncake.errors import ConfigError, RequestError
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import (
    Accepted,
    Cancel,
    ClusterState,
    Continue,
    DropContext,
    Ended,
    Failed,
    FromFront,
    FrontHello,
    InFlight,
    Interrupted,
    KeepContext,
    QuotaClaim,
    Rejected,
    Submit,
    Tokens,
    Unknown,
)
from mooncake.messages.operators import InstanceList, Migrates, OperatorAnswer, OperatorOrder, Ordered
from mooncake.messages.requests import Request
from mooncake.messages.workers import PROTOCOL_VERSION, SPOKEN, RegisterRefused
from mooncake.security.keys import ClusterKey

HEARTBEAT_S = 1.0
CONDUCTOR_TIMEOUT_S = 5.0  # for its answer to an operator's order
MAX_UNANSWERED = 5
"""The number of unanswered heartbeats beyond which the Conductor counts as gone.

Heartbeats are counted, not seconds: when a front goes on after a stop, many seconds have passed, but there
may be answers that the front has not read yet.
"""
_MAX_UNREAD = 64
"""The number of messages unread by the Conductor above which new requests wait.

The Conductor reads so many messages in some 10 ms.
"""
ACCEPTED_SINCE = 28
"""The oldest protocol version with which a Conductor sends `Accepted`."""
_MAX_OUTPUTS_AT_ONCE = 128
"""The most outputs of workers that are handled in one turn of the event loop."""

log = logging.getLogger(__name__)

FromConductor = (
    ClusterState
    | RegisterRefused
    | Accepted
    | Rejected
    | Failed
    | Interrupted
    | Ended
    | Unknown
    | OperatorAnswer
)


class ConductorPeer(Protocol):
    """The link to the Conductor: a `ConductorDealer`, or an `InProcessLink` in the Conductor's process."""

    @property
    def least_epoch(self) -> int:
        """The epoch of the Conductor that leads. A `ClusterState` of a lower epoch is dropped."""

    @property
    def num_queued(self) -> int:
        """The messages that were sent and that the Conductor has not read, as far as this end can tell."""

    async def send(self, message: FromFront, /) -> None:
        """Send a message, without waiting for the Conductor to take it.

        Raises PeerGoneError if too many messages are queued, or if the message is too long.
        """

    async def recv(self) -> FromConductor:
        """Wait for the next message."""

    async def follow(self) -> None:
        """Wait until another Conductor leads, and connect to it."""


class Link:
    """A front's connection to the cluster. Messages arrive only while `run` runs."""

    def __init__(
        self,
        conductor: ConductorPeer,
        reply_endpoint: str,
        key: ClusterKey,
        fingerprint: str,
        block_size: int,
        absence_timeout_s: float,
        on_dropped: Callable[[], None] = lambda: None,
        kept: Callable[[], Sequence[KeepContext]] = tuple,
        reply_listen_endpoint: str | None = None,
    ) -> None:
        """Open the socket for workers' tokens. Raises ConfigError for an unusable endpoint.

        Args:
            conductor: The link to the Conductor.
            reply_endpoint: The endpoint to which workers send tokens.
            key: The cluster key.
            fingerprint: The model's fingerprint.
            block_size: Tokens of a block.
            absence_timeout_s: Seconds without a token after which a request fails if the Conductor is gone.
            on_dropped: A callback for each stale output.
            kept: A function that returns the context caches, which are reported to each Conductor once.
            reply_listen_endpoint: The endpoint at which this front listens, if not `reply_endpoint`.
        """
        self._conductor = conductor
        self._replies: Router[Tokens] = Router(reply_listen_endpoint or reply_endpoint, Tokens, key)
        self.reply_to = advertised(reply_endpoint, self._replies.endpoint)
        """The endpoint where workers send this front's tokens."""
        self._fingerprint = fingerprint
        self._kept = kept
        self._in_flight = Receptions(block_size, absence_timeout_s, on_dropped)
        self._must_beat = asyncio.Event()
        self._orders: dict[int, asyncio.Future[OperatorAnswer]] = {}
        self._order_numbers = itertools.count(1)
        self._cluster: ClusterState | None = None
        self._num_unanswered = 0
        self.first_answer = asyncio.Event()
        """An event that is set once the Conductor has answered."""
        self._ended: UnavailableError | None = None

    @property
    def cluster(self) -> ClusterState | None:
        """The latest state that the Conductor sent; None if the Conductor does not answer.

        It is None before the first state, and after more than `MAX_UNANSWERED` unanswered heartbeats.
        """
        return self._cluster if self._num_unanswered <= MAX_UNANSWERED else None

    @property
    def prefill_costs(self) -> Costs | None:
        """The costs of prefill in the latest state that the Conductor sent; None if they are unknown.

        They are unknown before the first state, and while no instance computes prompts.
        """
        return None if self._cluster is None else self._cluster.prefill_costs

    @property
    def is_ahead_of_conductor(self) -> bool:
        """Whether the Conductor has so many messages to read that new requests should wait."""
        return self._conductor.num_queued > _MAX_UNREAD

    @property
    def num_in_flight(self) -> int:
        """The number of requests that were submitted and have not ended."""
        return len(self._in_flight)

    def num_received(self, request_id: str) -> int | None:
        """Return the number of a request's tokens that have arrived; None if the request is not in flight."""
        reception = self._in_flight.get(request_id)
        return None if reception is None else len(reception.token_ids)

    async def run(self) -> None:
        """Receive messages until cancelled, then close the workers' socket.

        Raises an ExceptionGroup with a ConfigError if the Conductor refuses this front.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive_from_conductor())
                group.create_task(self._receive_tokens())
                group.create_task(self._beat())
                group.create_task(self._follow())
        finally:
            self._replies.close()

    async def submit(
        self, request: Request, receive: Receive, claim: QuotaClaim | None = None, num_choices: int = 1
    ) -> bool:
        """Submit a request. Raises UnavailableError if the message cannot be sent, or after `end`.

        Args:
            request: The request.
            receive: A callback for the request's tokens, and for the error if one ends the request.
            claim: The answer's claim on the tenant's quota, for the first choice of an answer only.
            num_choices: The number of the answer's choices, for the first choice of an answer only.

        Returns:
            Whether the further choices must wait until `receive` has got an `Accepted`.
        """
        if self._ended is not None:
            raise self._ended
        cluster = self._cluster
        must_wait = num_choices > 1 and cluster is not None and cluster.version >= ACCEPTED_SINCE
        self._in_flight.add(request, receive, _now(), awaits_acceptance=must_wait)
        try:
            await self._conductor.send(Submit(request, claim, num_choices))
        except PeerGoneError as error:
            self._in_flight.remove(request.request_id)
            raise UnavailableError(f"the conductor does not answer: {error}") from None
        return must_wait

    async def cancel(self, request_id: str) -> None:
        """Forget a request, and tell the Conductor unless the request has ended by itself."""
        if (reception := self._in_flight.remove(request_id)) is not None:
            # Without a Conductor there is nobody to tell; it forgets the request when it restarts.
            with contextlib.suppress(PeerGoneError):
                await self._conductor.send(Cancel(request_id, len(reception.token_ids)))

    async def order(self, order: Callable[[int], OperatorOrder]) -> OperatorAnswer:
        """Return the Conductor's answer to an operator's order. `order` makes the order from its number.

        Raises UnavailableError if no answer comes within `CONDUCTOR_TIMEOUT_S`.
        """
        number = next(self._order_numbers)
        answer = self._orders[number] = asyncio.get_running_loop().create_future()
        try:
            await self._conductor.send(order(number))
            return await asyncio.wait_for(answer, CONDUCTOR_TIMEOUT_S)
        except (PeerGoneError, TimeoutError):
            raise UnavailableError("the conductor does not answer") from None
        finally:
            del self._orders[number]

    async def tell(self, message: KeepContext | DropContext) -> None:
        """Report a new, extended or deleted context cache to the Conductor. Raises UnavailableError."""
        try:
            await self._conductor.send(message)
        except PeerGoneError as error:
            raise UnavailableError(f"the conductor does not answer: {error}") from None

    async def end(self, error: UnavailableError) -> None:
        """Refuse further requests, and end those in flight with `error`."""
        self._ended = error
        await self._give_up(error)

    async def _give_up(self, error: RequestError) -> None:
        while self._in_flight:  # with one choice of an answer the others end
            await self._lose(next(iter(self._in_flight)), error)

    async def _lose(self, request_id: str, error: RequestError) -> None:
        """End a request with an error; its further tokens are dropped."""
        reception = self._in_flight.get(request_id)
        await self.cancel(request_id)
        if reception is not None:
            reception.receive(Lost(request_id, error))

    async def _beat(self) -> None:
        while True:
            self._must_beat.clear()
            self._num_unanswered += 1
            with contextlib.suppress(PeerGoneError):
                await self._conductor.send(self._hello())
                await self._conductor.send(InFlight(list(self._in_flight)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._must_beat.wait(), HEARTBEAT_S)
                continue  # there is another Conductor: beat at once
            for asked_for in self._in_flight.beat():
                await self._say(asked_for)
            if self.cluster is None:
                self._in_flight.conductor_is_gone(_now())

    async def _follow(self) -> None:
        while True:
            await self._conductor.follow()
            self._must_beat.set()

    def _hello(self) -> FrontHello:
        state = self._cluster
        epoch, num_instances = (0, 0) if state is None else (state.epoch, state.num_instances)
        return FrontHello(SPOKEN.oldest, self._fingerprint, epoch, num_instances, SPOKEN.newest)

    async def _receive_from_conductor(self) -> None:
        while True:
            match await self._conductor.recv():
                case ClusterState() as cluster:
                    await self._adopt(cluster)
                case RegisterRefused(message):
                    raise ConfigError(f"the conductor refused this front: {message}")
                case Accepted(request_id):
                    self._in_flight.accepted(request_id)
                case Rejected() | Failed() as ended:
                    self._in_flight.end(ended.request_id, error_of(ended))
                case Ordered() | InstanceList() | Migrates() as answer:
                    waiting = self._orders.get(answer.order)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
                case Interrupted(request_id):
                    await self._continue(request_id)
                case Ended(request_id, num_output_tokens):
                    self._in_flight.all_sent(request_id, num_output_tokens)
                case Unknown(request_ids):
                    self._in_flight.unknown(request_ids)

    async def _continue(self, request_id: str) -> None:
        """Resubmit an interrupted request with its output so far, or cancel it if it is no longer in flight.

        A request is interrupted when its instance is lost, its attempt fails, or another Conductor leads.
        """
        continued = self._in_flight.continued(request_id)
        await self._say(Cancel(request_id) if continued is None else Continue(continued))

    async def _say(self, message: Cancel | Continue) -> None:
        """Send the Conductor a message. An error is ignored, as the message may be lost.

        This front sends a lost message again later, by itself or because the Conductor asks again.
        """
        with contextlib.suppress(PeerGoneError):
            await self._conductor.send(message)

    async def _adopt(self, cluster: ClusterState) -> None:
        if cluster.epoch < self._conductor.least_epoch:
            return  # another Conductor leads by now
        is_first = self._cluster is None
        is_another = self._cluster is not None and self._cluster.epoch != cluster.epoch
        self._cluster, self._num_unanswered = cluster, 0
        self.first_answer.set()
        if (is_first or is_another) and cluster.version < PROTOCOL_VERSION:
            log.warning("the conductor speaks protocol %d: so does this front", cluster.version)
        if is_another:
            log.warning("there is another conductor; %d requests go on under it", len(self._in_flight))
            with contextlib.suppress(PeerGoneError):  # gone again
                await self._resume_all()
        elif not cluster.known and self._in_flight:
            log.warning("the conductor had given this front up; %d requests fail", len(self._in_flight))
            # Messages about their ends may have been lost with the connection.
            await self._give_up(
                UnavailableError("the conductor had lost its connection to this front; try again")
            )
        if is_first or is_another:
            with contextlib.suppress(PeerGoneError):
                for context in self._kept():
                    await self._conductor.send(context)

    async def _resume_all(self) -> None:
        """Report all requests in flight to another Conductor. Raises PeerGoneError."""
        for request_id in list(self._in_flight):
            if (resume := self._in_flight.resume(request_id, _now())) is not None:
                await self._conductor.send(resume)
                self._in_flight.accepted(request_id)
                await asyncio.sleep(0)  # streams go on meanwhile

    async def _receive_tokens(self) -> None:
        num_outputs = 0
        while True:
            _, message = await self._replies.recv()
            num_outputs += len(message.outputs)
            if num_outputs > _MAX_OUTPUTS_AT_ONCE:
                await asyncio.sleep(0)  # messages that have queued up must not starve the event loop
                num_outputs = len(message.outputs)
            now_s = _now()
            for output in message.outputs:
                try:
                    self._in_flight.deliver(output, now_s)
                except GenerationFailedError as error:
                    await self._lose(output.ref.request_id, error)


def _now() -> float:
    return asyncio.get_running_loop().time()
