"""One prefill worker on a real messenger process, and another instance that holds prefixes.

Owns: processes, the model, one timed prefill. Does not know: the comparison.
"""

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine import SMOLLM2
from benchmarks.other_host import HERE, THERE, enter
from kvstore.client.worker_client import WorkerClient
from messenger.wire.checksums import CHECKSUM_BYTES, layer_checksums
from mooncake.config.sections import KVCacheConfig, MessengerConfig
from mooncake.messages.blocks import BlockKey, KVDtype, KVLayout, block_keys, root_key
from mooncake.messages.pools import Grant, PrefixSource
from mooncake.messages.requests import Ref, Request, SamplingParams
from mooncake.messages.workers import Prefill, Prefilled, WorkFailed
from mooncake.node.process_config import MessengerProcess
from mooncake.security.keys import ClusterKey
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec
from workers.execution.executor import Executor
from workers.execution.jobs import Jobs
from workers.execution.loading import TORCH_DTYPES
from workers.execution.model_spec import model_spec
from workers.kvcache.copies import BlockCopy, LayerCopies, LoadedLayer, Mark, StagedLayer, copies_for
from workers.kvcache.layerwise import LayerTransfers, PassPart
from workers.prefill.pass_pace import PassPace
from workers.prefill.queue import PrefillQueue
from workers.prefill.runner import PrefillRunner
from workers.prefill.stage import Stage

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 32
PREFILL_CHUNK = 512
FINGERPRINT = "b" * 32
_CATCH_UP_S = 0.005


@dataclass(frozen=True, slots=True)
class Setup:
    """A model with random weights, and `num_pages` of KVCache on the device and in a pool."""

    spec: ModelSpec
    block_size: int
    prefill_chunk: int
    num_pages: int
    dtype: KVDtype = "bfloat16"
    device: str = "cpu"

    @property
    def layout(self) -> KVLayout:
        spec = self.spec
        return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, self.block_size, self.dtype)


SETUP = Setup(model_spec(SMOLLM2), BLOCK_SIZE, PREFILL_CHUNK, num_pages=300)
LAYOUT = SETUP.layout


class NoTransfers(LayerTransfers):
    """The transfers of a prefill that loads, stores and commits nothing."""

    def launch_load(self, layer: int, parts: Sequence[PassPart]) -> "Future[list[Mark]] | None":
        return None

    def launch_store(self, layer: int, parts: Sequence[PassPart]) -> None:
        pass


class Throttled:
    """Copies whose stores are throttled: one layer of one block takes `seconds_per_copy`."""

    def __init__(self, copies: LayerCopies, seconds_per_copy: float) -> None:
        self._copies, self._seconds_per_copy = copies, seconds_per_copy
        self._due_s = 0.0

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> LoadedLayer:
        return self._copies.load(layer, blocks, free)

    def stage(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> StagedLayer | None:
        return self._copies.stage(layer, blocks, computed)

    def store(self, layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
        # Count from the last copy's due time if that is near, to make up for a sleep that was too long.
        now_s = time.perf_counter()
        start_s = self._due_s if now_s - self._due_s < _CATCH_UP_S else now_s
        self._due_s = start_s + len(blocks) * self._seconds_per_copy
        checksums = self._copies.store(layer, blocks, staged)
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        return checksums

    def mark(self) -> Mark:
        return self._copies.mark()

    def wait(self, mark: Mark) -> None:
        self._copies.wait(mark)


class Instance:
    """A messenger process, to which a worker's client can connect.

    The process runs on this host or, if `host` names one, on another host. `address` is the address at which
    the other messenger reaches the process.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        key: ClusterKey,
        setup: Setup = SETUP,
        address: str = "127.0.0.1",
        host: str | None = None,
    ) -> None:
        socket_path = str(folder / f"{name}.sock")
        segment_fd = os.memfd_create(name)
        os.posix_fallocate(segment_fd, 0, setup.num_pages * (setup.layout.block_bytes + 8192) + (1 << 20))
        config = MessengerProcess(
            cluster_key=key,
            settings=MessengerConfig(transport="tcp", hosts=[address]),
            kvcache=KVCacheConfig(),
            instance=name,
            incarnation=1,
            worker_socket=socket_path,
            peer_socket=str(folder / f"{name}-peer.sock"),
            event_endpoints=(f"ipc://{folder}/{name}-ev", f"ipc://{folder}/{name}-rp"),
            segment_fd=segment_fd,
        )
        command = [sys.executable, "-m", "kvstore.server.service"]
        self.name, self.socket_path, self._layout = name, socket_path, setup.layout
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[segment_fd],
            cwd=ROOT,
            preexec_fn=None if host is None else functools.partial(enter, host),
        )
        os.close(segment_fd)
        assert self._process.stdin is not None
        self._process.stdin.write(config.model_dump_json().encode() + b"\n")
        self._process.stdin.flush()

    async def connect(self, client: type[WorkerClient] = WorkerClient) -> WorkerClient:
        """Return a worker's client of this class."""
        return await client.connect(
            self.socket_path,
            instance=self.name,
            incarnation=1,
            fingerprint=FINGERPRINT,
            layout=self._layout,
            timeout_s=60.0,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


class Bench:
    """Prefills one prompt after the other. Each is timed from its order to its first token."""

    def __init__(self, pool: WorkerClient, window: int | None = None, setup: Setup = SETUP) -> None:
        """Make the model. `window`: the number of layers for which the device has memory; None for all."""
        self.pool, self._setup = pool, setup
        spec, dtype, device = setup.spec, TORCH_DTYPES[setup.dtype], torch.device(setup.device)
        model = DecoderModel(spec, range(spec.num_layers), dtype, device)
        model.init_dummy_weights()
        kv = DeviceKVCache(
            spec, model.layers, setup.num_pages, setup.block_size, dtype, device, window=window
        )
        self._executor = Executor(model, kv)
        self._pace = PassPace()
        self._num_prompts = 0
        self._generator = torch.Generator().manual_seed(0)

    def new_prompt(self, num_tokens: int) -> list[int]:
        """Return a prompt of which no pool holds a block."""
        tokens: list[int] = torch.randint(
            min(1000, self._setup.spec.vocab_size // 2),
            min(40000, self._setup.spec.vocab_size),
            (num_tokens,),
            generator=self._generator,
        ).tolist()
        return tokens

    def transfers(
        self,
        *,
        overlap: bool = True,
        seconds_per_copy: float | None = None,
        kind: type[LayerTransfers] = LayerTransfers,
    ) -> LayerTransfers:
        """Return a worker's transfers, with throttled stores if `seconds_per_copy` is given."""
        copies = copies_for(self._executor.kv, self.pool.segment)
        if seconds_per_copy is not None:
            copies = Throttled(copies, seconds_per_copy)
        return kind(copies, overlap=overlap, window=self._executor.kv.window)

    def no_transfers(self) -> LayerTransfers:
        return NoTransfers(copies_for(self._executor.kv, self.pool.segment), overlap=False)

    async def prefill_s(
        self,
        tokens: list[int],
        transfers: LayerTransfers,
        *,
        source: PrefixSource | None = None,
        num_cached_tokens: int = 0,
    ) -> float:
        """Return the seconds of one prefill. Raises RuntimeError unless `num_cached_tokens` were reused."""
        [elapsed_s] = await self.prefills_s(
            [tokens], transfers, source=source, num_cached_tokens=num_cached_tokens
        )
        return elapsed_s

    async def prefills_s(
        self,
        prompts: Sequence[list[int]],
        transfers: LayerTransfers,
        *,
        source: PrefixSource | None = None,
        num_cached_tokens: int = 0,
    ) -> list[float]:
        """Return the seconds of each prompt, one after the other.

        The threads of `transfers` start with the first prompt, and end with the last.

        Raises RuntimeError unless each prompt reused `num_cached_tokens`.
        """
        answers: asyncio.Queue[Prefilled | WorkFailed] = asyncio.Queue()
        times_s = []
        async with asyncio.TaskGroup() as group:
            async with asyncio.TaskGroup() as jobs:
                stage = Stage(self._executor, self.pool, transfers)
                queue = PrefillQueue(self._setup.prefill_chunk)
                runner = PrefillRunner(stage, queue, answers.put, Jobs(jobs), lambda: "", lambda: None)
                runner.pace = self._pace  # a worker has one runner for all prompts
                loop = group.create_task(runner.run())
                for tokens in prompts:
                    started_s = time.perf_counter()
                    runner.start(self._order(tokens, source))
                    answer = await answers.get()
                    times_s.append(time.perf_counter() - started_s)
                    if not isinstance(answer, Prefilled) or answer.num_cached_tokens != num_cached_tokens:
                        raise RuntimeError(f"expected {num_cached_tokens} reused tokens, got {answer}")
            loop.cancel()
        return times_s

    def _order(self, tokens: list[int], source: PrefixSource | None) -> Prefill:
        self._num_prompts += 1
        ref = Ref(1, f"b{self._num_prompts}", 1)
        sampling = SamplingParams(max_tokens=1, temperature=0)
        request = Request(ref.request_id, tokens, keys_of(tokens, self._setup.block_size), sampling, "front")
        return Prefill(ref, request, Grant(1, self.pool.address, []), None, source)


def keys_of(tokens: list[int], block_size: int = BLOCK_SIZE) -> list[BlockKey]:
    """Return the keys of the full blocks of a prompt."""
    return block_keys(tokens, block_size, root_key(FINGERPRINT))


async def seal(pool: WorkerClient, tokens: list[int], num_blocks: int) -> None:
    """Seal the first blocks of a prompt in a pool, with the bytes that their pages have now."""
    reservation = await pool.reserve(keys_of(tokens)[:num_blocks], 0)
    for block in reservation.blocks:
        packed = layer_checksums(pool.segment.page_view(block.page), LAYOUT.layer_bytes)
        checksums = [
            int.from_bytes(packed[start : start + CHECKSUM_BYTES], "little")
            for start in range(0, len(packed), CHECKSUM_BYTES)
        ]
        layers = range(LAYOUT.num_layers)
        await pool.commit(reservation.reservation_id, layers, [block.page], [checksums])
    await pool.release(reservation.reservation_id)


@contextlib.asynccontextmanager
async def instances(
    setup: Setup = SETUP, *, host: str | None = None, client: type[WorkerClient] = WorkerClient
) -> AsyncIterator[tuple[WorkerClient, WorkerClient]]:
    """Make a context with two pools, and yield the workers' clients of both.

    Args:
        setup: The model and the sizes of the pools.
        host: The host of the second pool (`benchmarks.other_host`); None for this host.
        client: The class of the first pool's client.
    """
    key = ClusterKey.generate()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        here, there = ("127.0.0.1", "127.0.0.1") if host is None else (HERE, THERE)
        ours = Instance(Path(folder), "p", key, setup, here)
        stack.callback(ours.close)
        other = Instance(Path(folder), "holder", key, setup, there, host)
        stack.callback(other.close)
        clients = await ours.connect(client), await other.connect()
        try:
            yield clients
        finally:
            for each in clients:
                await each.close()
