"""Two decode instances as `mooncake-serve` runs them, each on one core, with a rig that gives orders.

The rig takes the place of Conductor and front.

Owns: processes, streams and the times of their tokens, the steps of moves. Does not know: the comparison.
"""

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.other_host import HERE, THERE, enter, other_host
from conductor.effects import ToConductor
from conductor.requests.migration import MAX_ROUNDS, MigrationStep, step_behind_copies
from mooncake.bus.zeromq import Router
from mooncake.config.settings import Config, load_config
from mooncake.messages.block_orders import DropCopies
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.fronts import Tokens
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import (
    FromMigration,
    HandedOver,
    HandOver,
    ModulesPart,
    ModulesPlace,
    MovesStats,
    PlaceModules,
    PreCopied,
    PreCopy,
    Prepare,
    Prepared,
    TakeOver,
)
from mooncake.messages.requests import Ref, Request, SamplingParams
from mooncake.messages.workers import (
    Abort,
    Finished,
    HeartbeatAck,
    Register,
    Registered,
    Reserve,
    Returning,
    ReturnNoted,
    ToWorker,
    WorkFailed,
)
from mooncake.node.lives import Life
from mooncake.node.plan import ChildSpec, plan_node
from mooncake.node.rundir import RunDirectory
from mooncake.security.keys import ClusterKey

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("a", "b")
START_DEADLINE_S = 120.0
DEADLINE_S = 60.0
Answer = FromMigration | Finished | WorkFailed
Expected = TypeVar("Expected", PreCopied, Prepared, HandedOver)


class MoveError(Exception):
    """The error of an instance that has not done its part of a move."""


class Instance:
    """A registered instance."""

    def __init__(self, register: Register, identity: bytes) -> None:
        self.register, self.identity = register, identity
        self.place = ModulesPlace()
        """The place of its modules, as the instance has last reported it."""
        self.placed = asyncio.Event()
        self.moves = MovesStats()
        """The totals of its moves of modules, as the instance has last reported them."""
        self.token_times_s: list[float] = []
        """The arrival times of tokens from this instance, for streams that have `counts` set."""

    def num_tokens(self, began_s: float, ended_s: float) -> int:
        """Return the number of counted tokens from `began_s` to `ended_s`."""
        return sum(began_s <= at_s < ended_s for at_s in self.token_times_s)


class Stream:
    """A request that the instance `at` decodes. Its present attempt is `ref`."""

    def __init__(self, request: Request, at: Instance, *, counts: bool) -> None:
        self.request, self.at, self.counts = request, at, counts
        self.num_attempts = 1
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self.changed = asyncio.Event()

    @property
    def ref(self) -> Ref:
        return Ref(1, self.request.request_id, self.num_attempts)

    async def reached(self, num_tokens: int) -> None:
        """Wait until the stream has `num_tokens` tokens. Raises TimeoutError if they do not come."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.tokens) < num_tokens:
                self.changed.clear()
                await self.changed.wait()


class Rig:
    """The instances by name, and the streams that they decode."""

    def __init__(self, folder: Path) -> None:
        self.key = ClusterKey.generate()
        self.key_file = folder / "key"
        self.key.save(self.key_file)
        self.endpoint = f"ipc://{folder}/conductor"
        self._reply_endpoint = f"ipc://{folder}/front"
        self.instances: dict[str, Instance] = {}
        self._router: Router[ToConductor] = Router(self.endpoint, ToConductor, self.key)
        self._replies: Router[Tokens] = Router(self._reply_endpoint, Tokens, self.key)
        self._joined = asyncio.Event()
        self._streams: dict[str, Stream] = {}
        self._answers: defaultdict[Ref, asyncio.Queue[Answer]] = defaultdict(asyncio.Queue)
        self._block_size = self._num_orders = 0

    async def run(self) -> None:
        """Receive messages and act on them until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive_tokens())
            while True:
                sender, message = await self._router.recv()
                match message:
                    case Register():
                        self.instances[message.instance] = Instance(message, sender)
                        self._block_size = message.layout.block_size
                        await self._router.send(sender, Registered(1))
                        self._joined.set()
                    case Returning():
                        await self._router.send(sender, ReturnNoted())
                    case Heartbeat():
                        await self._router.send(sender, HeartbeatAck(True, 1))
                        for instance in self.instances.values():
                            if instance.identity == sender:
                                instance.place, instance.moves = message.modules, message.moves
                                instance.placed.set()
                    case PreCopied() | Prepared() | HandedOver() | Finished() | WorkFailed():
                        self._answers[message.ref].put_nowait(message)

    async def _receive_tokens(self) -> None:
        while True:
            _, message = await self._replies.recv()
            now_s = time.perf_counter()
            for output in message.outputs:
                stream = self._streams.get(output.ref.request_id)
                if stream is None or output.ref != stream.ref:
                    continue
                if output.position != len(stream.tokens):
                    raise MoveError(f"token {output.position} came behind {len(stream.tokens)} tokens")
                stream.tokens += output.token_ids
                stream.times_s += [now_s] * len(output.token_ids)
                if stream.counts:
                    stream.at.token_times_s += [now_s] * len(output.token_ids)
                stream.changed.set()

    async def joined(self) -> None:
        """Wait until both instances have registered."""
        async with asyncio.timeout(START_DEADLINE_S):
            while len(self.instances) < len(NAMES):
                self._joined.clear()
                await self._joined.wait()

    def close(self) -> None:
        self._router.close()
        self._replies.close()

    # -- streams ------------------------------------------------------------------------------------

    async def begin(
        self, name: str, prompt: list[int], max_tokens: int, at: Instance, *, seed: int, counts: bool = False
    ) -> Stream:
        """Order a request. The instance computes its prompt itself.

        `counts`: whether the times of the request's tokens are recorded in the instance's `token_times_s`.
        """
        root = root_key(at.register.fingerprint)
        keys = block_keys(prompt, self._block_size, root)
        sampling = SamplingParams(max_tokens, seed=seed)
        request = Request(name, prompt, keys, sampling, self._reply_endpoint, root_key=root)
        return await self._reserve(Stream(request, at, counts=counts))

    async def begin_again(self, stream: Stream, name: str, at: Instance) -> Stream:
        """Order the request of a stream again, with the same prompt and sampling, as a further stream."""
        request = msgspec.structs.replace(stream.request, request_id=name)
        return await self._reserve(Stream(request, at, counts=False))

    async def _reserve(self, stream: Stream) -> Stream:
        self._streams[stream.request.request_id] = stream
        await self._tell(stream.at, Reserve(stream.ref, stream.request, inline=True))
        return stream

    async def end(self, stream: Stream) -> None:
        """Abort a stream."""
        del self._streams[stream.request.request_id]
        await self._tell(stream.at, Abort(stream.ref))

    @property
    def first(self) -> Instance:
        """The instance that registered first."""
        return next(iter(self.instances.values()))

    def other(self, instance: Instance) -> Instance:
        """Return the other of the two instances."""
        [other] = [other for other in self.instances.values() if other is not instance]
        return other

    async def drop_blocks(self, stream: Stream, instance: Instance) -> None:
        """Drop the blocks of a stream that an instance's pool holds."""
        keys = stream.request.continued(stream.tokens, self._block_size).block_keys
        await self._tell(instance, DropCopies(keys))

    # -- moves --------------------------------------------------------------------------------------

    async def migrate(self, stream: Stream) -> None:
        """Move a stream as the Conductor does: blocks are copied in rounds while the stream is decoded."""
        source, destination, ref = stream.at, self.other(stream.at), self._next_ref(stream)
        order, num_loaded, num_rounds, has_waited = PreCopy(stream.ref), 0, 0, False
        while num_rounds < MAX_ROUNDS:
            output = (await self._ask(source, order, stream.ref, PreCopied)).output
            num_lacking = stream.request.num_prompt_tokens + len(output) - num_loaded
            step = step_behind_copies(num_lacking, num_rounds, self._block_size, has_waited=has_waited)
            if step is MigrationStep.COPYING:
                order, has_waited = PreCopy(stream.ref, num_loaded + self._block_size), True
            elif step is MigrationStep.PREPARING:
                num_loaded = (await self._prepare(stream, ref, output)).num_tokens
                order, num_rounds = PreCopy(stream.ref), num_rounds + 1
            else:
                break
        output = await self._hand_over(stream)
        await self._take_over(stream, destination, output)

    async def stop_and_copy(self, stream: Stream) -> None:
        """Move a stream that is stopped first and copied afterwards."""
        destination, ref = self.other(stream.at), self._next_ref(stream)
        output = await self._hand_over(stream)
        num_full = (stream.request.num_prompt_tokens + len(output) - 1) // self._block_size
        while (await self._prepare(stream, ref, output)).num_tokens < num_full * self._block_size:
            pass  # the source stores its last blocks after its answer
        await self._take_over(stream, destination, output)

    async def recompute(self, stream: Stream) -> None:
        """Move a stream without its KVCache, which its destination computes again."""
        destination = self.other(stream.at)
        output = await self._hand_over(stream)
        request = stream.request.continued(output, self._block_size)
        stream.num_attempts += 1
        stream.at = destination
        await self._tell(destination, Reserve(stream.ref, request, inline=True))

    async def place(self, owner: Instance, part: ModulesPart) -> ModulesPlace:
        """Move a part of an instance to the other instance. An empty part moves everything back.

        Returns when the instance has reported the end of the move.
        """
        self._num_orders += 1
        helper = self.other(owner).register
        address = helper.modules.endpoint or helper.modules.socket
        order = PlaceModules(1, self._num_orders, helper.instance, address, part)
        await self._tell(owner, order)
        async with asyncio.timeout(DEADLINE_S):
            while owner.place.number != order.number or owner.place.is_moving:
                owner.placed.clear()
                await owner.placed.wait()
        if owner.place.error:
            raise MoveError(owner.place.error)
        return owner.place

    def _next_ref(self, stream: Stream) -> Ref:
        return Ref(1, stream.request.request_id, stream.num_attempts + 1)

    async def _prepare(self, stream: Stream, ref: Ref, output: list[int]) -> Prepared:
        request = stream.request.continued(output, self._block_size)
        order = Prepare(ref, request, stream.at.register.shards, DEADLINE_S)
        return await self._ask(self.other(stream.at), order, ref, Prepared)

    async def _hand_over(self, stream: Stream) -> list[int]:
        output = (await self._ask(stream.at, HandOver(stream.ref), stream.ref, HandedOver)).output
        await stream.reached(len(output))  # tokens come over another connection
        return output

    async def _take_over(self, stream: Stream, destination: Instance, output: list[int]) -> None:
        stream.num_attempts += 1
        stream.at = destination
        request = stream.request.continued(output, self._block_size)
        await self._tell(destination, TakeOver(stream.ref, request))

    async def _ask(self, instance: Instance, order: ToWorker, ref: Ref, expected: type[Expected]) -> Expected:
        await self._tell(instance, order)
        async with asyncio.timeout(DEADLINE_S):
            answer = await self._answers[ref].get()
        if not isinstance(answer, expected):
            raise MoveError(f"{type(order).__name__} was answered by {answer}")
        return answer

    async def _tell(self, instance: Instance, order: ToWorker) -> None:
        await self._router.send(instance.identity, order)


def _start(spec: ChildSpec, core: int, host: str | None) -> subprocess.Popen[bytes]:
    """Start a process of an instance on one core. `host` names another host to run on; None for this host."""
    process = subprocess.Popen(
        [sys.executable, "-m", spec.module],
        stdin=subprocess.PIPE,
        pass_fds=spec.pass_fds,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=None if host is None else functools.partial(enter, host),
    )
    os.sched_setaffinity(process.pid, {core})
    assert process.stdin is not None
    process.stdin.write(spec.config(Life(1)).encode() + b"\n")
    process.stdin.flush()
    return process


def _config_of(rig: Rig, name: str, max_batch: int, device_bytes: str, address: str | None) -> Config:
    flags = {
        ("role",): "decode",
        ("instance",): name,
        ("conductor", "endpoint"): rig.endpoint,
        ("security", "key_file"): str(rig.key_file),
        ("kvcache", "pool_bytes"): "1GiB",
        ("kvcache", "device_bytes"): device_bytes,
        ("worker", "num_threads"): "1",
        ("worker", "max_batch"): str(max_batch),
    }
    if address is not None:
        flags |= {("messenger", "hosts"): address, ("worker", "modules_listen"): f"{address}:0"}
    return load_config(None, {}, flags)


@contextlib.asynccontextmanager
async def rig(
    max_batch: int = 32, *, device_bytes: Sequence[str] = ("1GiB", "1GiB"), two_hosts: bool = False
) -> AsyncIterator[Rig]:
    """Make a context with both instances, ready, on one host or two.

    Each is on a core of its own if there are enough cores. `device_bytes` are the sizes of their KVCaches.
    """
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
        made = Rig(folder)
        processes = []
        hosts: list[tuple[str | None, str | None]] = [(None, None)] * len(NAMES)
        if two_hosts:
            hosts = [(None, HERE), (stack.enter_context(other_host()), THERE)]
        loop = asyncio.create_task(made.run())
        try:
            for index, name in enumerate(NAMES):
                run_dir = stack.enter_context(RunDirectory())
                host, address = hosts[index]
                specs = plan_node(_config_of(made, name, max_batch, device_bytes[index], address), run_dir)
                processes += [_start(spec, cores[index % len(cores)], host) for spec in specs]
            await made.joined()
            yield made
        finally:
            for process in reversed(processes):  # a worker before its messenger
                process.terminate()
                process.communicate()
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop
            made.close()
