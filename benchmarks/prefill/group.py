"""Prefill instances as `mooncake-serve` runs them, each stage on one core, under a simple Conductor.

Owns: processes, one timed prefill. Does not know: the comparison.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.prefill.traced_worker import TRACE_VARIABLE
from conductor.effects import ToConductor
from mooncake.bus.zeromq import Router
from mooncake.config.settings import Config, load_config
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.pools import Grant
from mooncake.messages.requests import Ref, Request, SamplingParams
from mooncake.messages.workers import HeartbeatAck, Prefill, Prefilled, Register, Registered, WorkFailed
from mooncake.node.lives import Life
from mooncake.node.plan import ChildSpec, plan_node
from mooncake.node.rundir import RunDirectory
from mooncake.security.keys import ClusterKey

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 32
START_DEADLINE_S = 120.0


class Instance:
    """A registered prefill instance of one or several stages."""

    def __init__(self, register: Register, identity: bytes) -> None:
        self.register, self.identity = register, identity


class Rig:
    """A Conductor without policy. `instances` has each instance by its number of stages."""

    def __init__(self, folder: Path) -> None:
        self.key = ClusterKey.generate()
        self.key_file = folder / "key"
        self.key.save(self.key_file)
        self.trace_file = folder / "trace"
        self.trace_file.touch()
        self.endpoint = f"ipc://{folder}/conductor"
        self.instances: dict[int, Instance] = {}
        self._router: Router[ToConductor] = Router(self.endpoint, ToConductor, self.key)
        self._joined = asyncio.Event()
        self._answer: asyncio.Future[Prefilled | WorkFailed] = asyncio.Future()
        self._num_orders = 0

    async def run(self) -> None:
        """Receive messages and act on them until cancelled."""
        while True:
            sender, message = await self._router.recv()
            match message:
                case Register():
                    self.instances[len(message.shards)] = Instance(message, sender)
                    await self._router.send(sender, Registered(1))
                    self._joined.set()
                case Heartbeat():
                    await self._router.send(sender, HeartbeatAck(True, 1))
                case Prefilled() | WorkFailed():
                    self._answer.set_result(message)

    async def prefill_s(self, num_stages: int, tokens: list[int]) -> float:
        """Return the seconds from the order to the first token. Raises RuntimeError if the prefill fails."""
        instance = self.instances[num_stages]
        self._num_orders += 1
        ref = Ref(1, f"b{self._num_orders}", 1)
        keys = block_keys(tokens, BLOCK_SIZE, root_key(instance.register.fingerprint))
        request = Request(ref.request_id, tokens, keys, SamplingParams(max_tokens=1, temperature=0), "front")
        grant = Grant(1, instance.register.shards[0].messenger, [])  # nothing travels
        self._answer = asyncio.get_running_loop().create_future()
        started_s = time.perf_counter()
        await self._router.send(instance.identity, Prefill(ref, request, grant))
        answer = await self._answer
        elapsed_s = time.perf_counter() - started_s
        if isinstance(answer, WorkFailed) or answer.num_cached_tokens:
            raise RuntimeError(f"expected a computed prompt, got {answer}")
        return elapsed_s

    async def joined(self, num_instances: int) -> None:
        """Wait until `num_instances` instances have registered."""
        async with asyncio.timeout(START_DEADLINE_S):
            while len(self.instances) < num_instances:
                self._joined.clear()
                await self._joined.wait()

    def close(self) -> None:
        self._router.close()


def start(spec: ChildSpec, rig: Rig, core: int) -> subprocess.Popen[bytes]:
    """Start the process of a stage on one core."""
    module = "benchmarks.prefill.traced_worker" if spec.module == "workers.process.service" else spec.module
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        pass_fds=spec.pass_fds,
        cwd=ROOT,
        env={**os.environ, TRACE_VARIABLE: str(rig.trace_file), "OMP_NUM_THREADS": "1"},
    )
    os.sched_setaffinity(process.pid, {core})
    assert process.stdin is not None
    process.stdin.write(spec.config(Life(1)).encode() + b"\n")
    process.stdin.flush()
    return process


def config_of(rig: Rig, num_stages: int, chunks: str) -> Config:
    """Return the configuration of an instance with one core for each stage."""
    flags = {
        ("role",): "prefill",
        ("instance",): f"x{num_stages}",
        ("conductor", "endpoint"): rig.endpoint,
        ("security", "key_file"): str(rig.key_file),
        ("kvcache", "block_size"): str(BLOCK_SIZE),
        ("kvcache", "pool_bytes"): "512MiB",
        ("kvcache", "device_bytes"): "512MiB",
        ("worker", "num_threads"): "1",
        ("pipeline", "stages"): str(num_stages),
        ("pipeline", "chunks"): chunks,
    }
    return load_config(None, {}, flags)


@contextlib.asynccontextmanager
async def rig_of(all_num_stages: list[int], chunks: str) -> AsyncIterator[Rig]:
    """Make a context with an instance for each number of stages. All instances are ready.

    Stage s of each instance is on core s.
    """
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
        rig = Rig(folder)
        processes = []
        loop = asyncio.create_task(rig.run())
        try:
            for num_stages in all_num_stages:
                run_dir = stack.enter_context(RunDirectory())
                specs = plan_node(config_of(rig, num_stages, chunks), run_dir)
                for index, spec in enumerate(specs):  # messenger and worker of each stage in turn
                    processes.append(start(spec, rig, cores[index // 2 % len(cores)]))
            await rig.joined(len(all_num_stages))
            yield rig
        finally:
            loop.cancel()
            for process in processes:
                process.terminate()
                process.communicate()
            rig.close()
