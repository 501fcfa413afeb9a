"""A tokenizer whose tokens are bytes, and a cluster that does what a test tells it.

The front under test runs with its fake cluster in an event loop of its own, in a thread. The test is an
ordinary client.
"""

import asyncio
import codecs
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import tokenizers
import uvloop
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from conductor.front.caches.cache_file import SCHEMA, CacheFile
from conductor.front.config import FrontConfig
from conductor.front.generation.link import FromConductor
from conductor.front.http.draining import FrontDrain
from conductor.front.http.server import listen
from conductor.front.openai.model import ServedModel
from conductor.front.process import server
from conductor.telemetry.display import Display
from mooncake.bus.zeromq import peer_identity
from mooncake.errors import RequestError
from mooncake.leadership.conductor_dealer import ConductorDealer
from mooncake.leadership.leaders import Leader, Leaders
from mooncake.messages.fronts import (
    Accepted,
    Cancel,
    ClusterState,
    Continue,
    DropContext,
    Failed,
    FromFront,
    FrontHello,
    InFlight,
    KeepContext,
    QuotaClaim,
    Rejected,
    Resume,
    Submit,
    TokenOutput,
    Tokens,
    Unknown,
)
from mooncake.messages.operators import (
    ChangeRole,
    Drain,
    InstanceList,
    InstanceStatus,
    ListInstances,
    Migrate,
    Migrates,
    MoveModules,
    Ordered,
)
from mooncake.messages.requests import FinishReason, Ref, Request, TokenLogprobs
from mooncake.messages.workers import PROTOCOL_VERSION, InstanceState, Role
from mooncake.model.grammar import Grammars, Vocabulary
from mooncake.node.state_file import StateFile
from mooncake.security.curve import LARGEST_FRAME_BYTES, Gate, use_key
from mooncake.security.keys import ClusterKey
from mooncake.tracing.tracer import Tracer
from tests.deadline import DEADLINE_S

EOS = 256
MODEL_NAME = "test/model"
CLUSTER_KEY = ClusterKey.generate()


class ByteTokenizer:
    """A tokenizer in which token `i` below 256 is byte `i`. Token 256 ends a text."""

    def __init__(self) -> None:
        self.vocab_size = 257
        self.max_token_chars = 1
        self.eos_token_ids: tuple[int, ...] = (EOS,)
        self.special_token_ids = frozenset({EOS})

    def token_bytes(self, token_id: int, /) -> bytes:
        return b"<end>" if token_id == EOS else bytes([token_id])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        shown = (token for token in ids if not (skip_special_tokens and token == EOS))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Any = (),
        **variables: Any,
    ) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise RequestError("the model's chat template refused: user must begin", param="messages")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        text = "".join(f"{tool['function']['name']}()\n" for tool in tools) + text
        text = "".join(f"{name}={value}\n" for name, value in variables.items()) + text
        return self.encode(text + "assistant: " * add_generation_prompt)


class ByteDetokenizer:
    def __init__(self, hides_special_tokens: bool = True) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int], /) -> str:
        return self._decoder.decode(bytes(token_id for token_id in ids if token_id != EOS))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def byte_model(context_len: int = 1000, block_size: int = 16) -> ServedModel:
    grammars = Grammars(lambda: Vocabulary(byte_backend(), (EOS,), 257))
    return ServedModel(ByteTokenizer(), ByteDetokenizer, context_len, 257, "f" * 32, block_size, grammars)


def byte_backend() -> tokenizers.Tokenizer:
    """Return a tokenizer like `ByteTokenizer` for code that needs one of Hugging Face's."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_level_characters())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def _byte_level_characters() -> list[str]:
    """Return the characters by which GPT-2's tokenizer represents bytes, in the order of bytes."""
    others = iter(range(256, 512))
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


Behaviour = Callable[["FakeCluster", Request], Awaitable[None]]


ONLY_INSTANCE = InstanceStatus("d0", Role.DECODE, InstanceState.DRAINING, 3, num_moved=2)
"""The only instance that the fake Conductor knows. It obeys orders that are forced."""


async def answer_hello(cluster: "FakeCluster", request: Request) -> None:
    await cluster.say(request, "Hello!", end=True)


class FakeCluster:
    """Conductor and worker in one. `behaviour` handles each request.

    `submitted` and `cancelled` record the requests that came and that were cancelled.
    """

    def __init__(self, control_endpoint: str) -> None:
        self._gate = Gate(CLUSTER_KEY, zmq.ROUTER)
        self._context = zmq.asyncio.Context()
        [self._control] = self._gate.sockets
        self._control.bind(control_endpoint)
        self._front = b""
        self._workers: dict[str, zmq.asyncio.Socket] = {}
        self._changed = threading.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.get_running_loop()
        self.reset()

    def reset(self) -> None:
        self.behaviour: Behaviour = answer_hello
        self.state = ClusterState(
            epoch=1, num_prefill=1, num_decode=1, max_sequence_blocks=1000, version=PROTOCOL_VERSION
        )
        self.silent = False
        self.accepts = True
        """Whether the fake Conductor accepts answers of several choices as soon as the first one comes."""
        self.num_hellos = 0
        self.submitted: list[Request] = []
        self.claims: list[QuotaClaim | None] = []
        """The quota claims of the submitted requests."""
        self.resumed: list[Request] = []
        self.cancelled: list[str] = []
        self.unknown: set[str] = set()
        """Requests that the fake Conductor says it does not know."""
        self.continued: list[Request] = []
        self.attempts_to_replace: list[int | None] = []
        """The attempts that `Continue` messages named, one for each request in `continued`.

        The front has got tokens of such an attempt, but not the tokens before them.
        """
        self.migrates: list[Migrate] = []
        self.orders: list[Drain | ChangeRole | MoveModules] = []
        self.contexts: list[KeepContext | DropContext] = []

    async def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromFront)
        try:
            while True:
                self._front, *frames = await self._control.recv_multipart()
                message = decoder.decode(b"".join(frames))
                match message:
                    case FrontHello():
                        self.num_hellos += 1
                        if not self.silent:
                            await self.to_front(self.state)
                    case InFlight(request_ids):
                        if unknown := self.unknown.intersection(request_ids):
                            await self.to_front(Unknown([*unknown]))
                    case Submit(request, claim, num_choices):
                        if num_choices > 1 and self.accepts:
                            await self.to_front(Accepted(request.request_id))
                        self.claims.append(claim)
                        self.submitted.append(request)
                        task = asyncio.create_task(self._behave(request))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                    case Resume(request):
                        self.resumed.append(request)
                    case Continue(request, attempt):
                        self.continued.append(request)
                        self.attempts_to_replace.append(attempt)
                    case Migrate(order, request_id, instance):
                        self.migrates.append(message)
                        refusal = "" if instance == "d1" else "it stays"
                        source = "d0" if request_id == "r" else None
                        await self.to_front(Migrates(order, source, None if refusal else instance, refusal))
                    case ListInstances(order):
                        await self.to_front(InstanceList(order, [ONLY_INSTANCE], epoch=3))
                    case Drain(order, instance) | ChangeRole(order, instance):
                        self.orders.append(message)
                        status = ONLY_INSTANCE if instance == ONLY_INSTANCE.name else None
                        refusal = "" if status is not None and message.force else "the last one, or unknown"
                        await self.to_front(Ordered(order, status, refusal))
                    case MoveModules(order):
                        self.orders.append(message)
                        await self.to_front(Ordered(order, ONLY_INSTANCE))
                    case KeepContext() | DropContext():
                        self.contexts.append(message)
                    case Cancel(request_id):
                        self.cancelled.append(request_id)
                with self._changed:
                    self._changed.notify_all()
        finally:
            for task in self._tasks:
                task.cancel()
            self._gate.close()
            self._context.destroy(linger=0)

    async def _behave(self, request: Request) -> None:
        await self.behaviour(self, request)

    async def to_front(self, message: msgspec.Struct) -> None:
        await self._control.send_multipart([self._front, msgspec.msgpack.encode(message)])

    async def reject(self, request: Request, status: int, message: str, retry_after_s: float | None) -> None:
        await self.to_front(Rejected(request.request_id, "max_waiting", status, message, retry_after_s))

    async def fail(
        self, request: Request, message: str, *, is_refused: bool = False, param: str | None = None
    ) -> None:
        await self.to_front(Failed(request.request_id, message, is_refused=is_refused, param=param))

    async def send_tokens(
        self,
        request: Request,
        token_ids: Sequence[int],
        position: int = 0,
        finish: FinishReason | None = None,
        *,
        attempt: int = 1,
        num_cached_tokens: int = 16,
    ) -> None:
        """Send one `Tokens` message for a request, as a worker does. A logprob is minus the token's id."""
        ref = Ref(epoch=1, request_id=request.request_id, attempt=attempt)
        output = TokenOutput(ref, position, list(token_ids), num_cached_tokens, finish)
        num_top = request.sampling.num_logprobs
        if num_top is not None:
            top = list(range(97, 97 + num_top))
            logprobs = [TokenLogprobs(-token, top, [-float(other) for other in top]) for token in token_ids]
            output = msgspec.structs.replace(output, logprobs=logprobs)
        await self.send_step(request.reply_to, [output])

    async def send_step(self, reply_to: str, outputs: list[TokenOutput]) -> None:
        """Send one `Tokens` message with outputs of several requests."""
        worker = self._workers.get(reply_to)
        if worker is None:
            worker = self._workers[reply_to] = self._context.socket(zmq.DEALER)
            use_key(worker, CLUSTER_KEY)
            worker.connect(reply_to)
        message = msgspec.msgpack.encode(Tokens(outputs))
        starts = range(0, len(message), LARGEST_FRAME_BYTES)
        await worker.send_multipart([message[start : start + LARGEST_FRAME_BYTES] for start in starts])

    async def say(self, request: Request, text: str, *, end: bool = False, step: int = 1) -> None:
        """Send `text` in messages of `step` tokens.

        With `end` an end token follows, otherwise the limit ends it.
        """
        token_ids = [*text.encode(), EOS] if end else list(text.encode())
        last = FinishReason.STOP if end else FinishReason.LENGTH
        for start in range(0, len(token_ids), step):
            finish = last if start + step >= len(token_ids) else None
            await self.send_tokens(request, token_ids[start : start + step], start, finish)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait, in the test's thread, until `condition` is true.

        It is checked after each message to the cluster.
        """
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_S), "it did not happen within the deadline"


def conductor_peer(control_endpoint: str, leaders: Leaders | None = None) -> ConductorDealer[FromConductor]:
    """Return a connection to the Conductor, like that of a front. Needs a running event loop."""
    leaders = leaders or Leaders(Leader(control_endpoint))
    return ConductorDealer(leaders, peer_identity("front", 1), FromConductor, CLUSTER_KEY)


class Running:
    """A running front, and its fake cluster."""

    def __init__(
        self,
        cluster: FakeCluster,
        url: str,
        registry: CollectorRegistry,
        model: ServedModel,
        drain: FrontDrain,
        has_drained: threading.Event,
    ) -> None:
        self.cluster, self.url, self.registry, self.model = cluster, url, registry, model
        self._drain, self.has_drained = drain, has_drained
        self.address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))

    def begin_to_drain(self) -> None:
        """Begin the front's drain, and wait until it has begun."""
        begun = threading.Event()

        def begin() -> None:
            self._drain.begin()
            begun.set()

        self.cluster.loop.call_soon_threadsafe(begin)
        assert begun.wait(DEADLINE_S)

    def publish(self, state: ClusterState) -> None:
        """Change the cluster's state, and wait until the front shows it.

        At least one number of instances must change, because the front does not show the sizes.
        """
        expected = (state.num_prefill, state.num_decode)
        cluster = self.cluster
        cluster.state = state
        asyncio.run_coroutine_threadsafe(cluster.to_front(state), cluster.loop).result(DEADLINE_S)
        deadline_s = time.monotonic() + DEADLINE_S
        with httpx.Client(base_url=self.url, timeout=DEADLINE_S, verify=False) as client:
            while time.monotonic() < deadline_s:
                ready = client.get("/ready").json()
                if "error" in ready and 0 in expected:
                    return
                if (ready.get("num_prefill"), ready.get("num_decode")) == expected:
                    return
        raise AssertionError(f"the front does not show {state}, but {ready}")

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def running_front(
    directory: Path,
    model: ServedModel,
    display: Display | None = None,
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    send_buffer_bytes: int | None = None,
    tracer: Tracer | None = None,
    **config: Any,
) -> Iterator[Running]:
    """Make a context with a front on a free port of the loopback interface.

    `display` is that of a Conductor in the same process. `send_buffer_bytes` is the size of the kernel's
    buffer of each connection; None for its default of some MB.
    """
    listener = listen("127.0.0.1", 0)
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    started: list[Running] = []
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []
    is_up = threading.Event()

    async def main() -> None:
        front_config = FrontConfig(
            reply_endpoint=f"ipc://{directory}/reply",
            cluster_key=CLUSTER_KEY,
            served_model_name=MODEL_NAME,
            **config,
        )
        cluster = FakeCluster(f"ipc://{directory}/control")
        conductor = conductor_peer(f"ipc://{directory}/control")
        registry = CollectorRegistry()
        has_drained = threading.Event()
        drain = FrontDrain(has_drained.set)

        def on_listening(url: str) -> None:
            started.append(Running(cluster, url, registry, model, drain, has_drained))
            is_up.set()

        state = StateFile(directory / "state.db", (SCHEMA,))
        serving = asyncio.create_task(
            server.serve(
                front_config,
                model,
                conductor,
                registry,
                listener,
                on_listening,
                display,
                CacheFile(state),
                tracer,
                drain,
            )
        )
        faking = asyncio.create_task(cluster.run())
        loop = asyncio.get_running_loop()
        stop.append((loop, serving))
        await asyncio.wait([serving])
        state.close()
        conductor.close()
        faking.cancel()
        await asyncio.wait([faking])

    def run() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert is_up.wait(DEADLINE_S)
        started[0].cluster.wait_until(lambda: started[0].cluster.num_hellos > 0)
        started[0].publish(started[0].cluster.state)  # a request that came before it would be refused
        yield started[0]
    finally:
        for loop, serving in stop:
            loop.call_soon_threadsafe(serving.cancel)
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the front did not stop"


def raw_request(address: tuple[str, int], path: str, body: bytes) -> socket.socket:
    """Return a connection on which a POST was sent."""
    connection = socket.create_connection(address, timeout=DEADLINE_S)
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection
