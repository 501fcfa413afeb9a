"""Prefill alone: a runner on real messengers, a decode side that only receives, holders of prefixes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from kvstore.client import KVCachePool
from kvstore.segment import Segment
from kvstore.worker_client import WorkerClient
from mooncake.blocks import BlockKey, KVLayout, block_keys, root_key
from mooncake.config import KVCacheConfig, TransportChoice
from mooncake.messages import (
    Grant,
    Prefill,
    Prefilled,
    PrefixSource,
    Ref,
    Request,
    SamplingParams,
    WorkFailed,
)
from tests.kvstore.nodes import DEADLINE_S, Node
from workers.copies import Copies, copies_for
from workers.engine.batch import Chunk
from workers.engine.kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.spec import ModelSpec
from workers.executor import Executor
from workers.jobs import Jobs
from workers.layerwise import LayerTransfers
from workers.pool_view import PoolView
from workers.prefill import PrefillRunner

BLOCK_SIZE = 8
FINGERPRINT = "f" * 32
NUM_PAGES = 96
ACK_TIMEOUT_S = 3.0
"""how long pages may be quarantined for whoever hangs"""
NUM_OUTPUT_TOKENS = 6
SAMPLING = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0)


@dataclass(frozen=True, slots=True)
class Result:
    """What the decode side has got of one prompt: greedy tokens, and the bytes of each block."""

    tokens: list[int]
    blocks: list[bytes]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Setting:
    """How the runner works."""

    prefill_chunk: int = 1000
    overlap: bool = True
    make_copies: Callable[[DeviceKVCache, Segment], Copies] = copies_for


class Receiving:
    """A prompt's pages at the decode side. `grant` opens them."""

    def __init__(self, lab: "Lab", number: int, prompt: Sequence[int]) -> None:
        self.ref = Ref(1, f"r{number}", 1)
        keys = lab.keys_of(prompt)
        self.request = Request(self.ref.request_id, list(prompt), keys, SAMPLING, "front")
        self.answered: asyncio.Future[Prefilled | WorkFailed] = asyncio.get_running_loop().create_future()
        self.grant: Grant | None = None
        self._lab = lab

    async def begin(self) -> None:
        num_private = 1 if len(self.request.token_ids) % BLOCK_SIZE else 0
        self.reservation = await self._lab.decode.reserve(self.request.block_keys, num_private)
        self.grant = await self._lab.decode.grant(self.reservation.reservation_id)

    async def release(self) -> None:
        await self._lab.decode.release(self.reservation.reservation_id)

    async def result(self) -> Result:
        """Waits until it is there, decodes, releases."""
        async with asyncio.timeout(DEADLINE_S):
            answer = await self.answered
            assert isinstance(answer, Prefilled), answer
            await self._lab.decode.wait_arrived(self.reservation.reservation_id)
        pages = [block.page for block in self.reservation.blocks]
        blocks = [bytes(self._lab.decode.segment.page_view(page)) for page in pages]
        num_in_last = len(self.request.token_ids) % BLOCK_SIZE
        if num_in_last:
            blocks[-1] = self._lab.without_rest(blocks[-1], num_in_last)
        tokens = self._lab.continue_greedily(self.request.token_ids, answer.first_token, pages)
        await self.release()
        return Result(tokens, blocks, answer.num_cached_tokens)


class Lab:
    """Made by `prefill_lab`."""

    def __init__(
        self, model: transformers.PreTrainedModel, folder: Path, nodes: contextlib.ExitStack
    ) -> None:
        self.spec = ModelSpec.from_hf_config(model.config.to_dict())
        self.model = DecoderModel(self.spec, range(self.spec.num_layers), torch.float32)
        self.model.load_weights(model.state_dict().items())
        self.layout = KVLayout(
            self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, BLOCK_SIZE, "float32"
        )
        self.executor = self._executor()
        self._folder, self._nodes = folder, nodes
        self._decoder = self._executor()
        self._num_prompts = 0
        self._receiving: dict[Ref, Receiving] = {}
        self.answers: dict[Ref, list[Prefilled | WorkFailed]] = {}
        self.runner: PrefillRunner

    def _executor(self) -> Executor:
        kv = DeviceKVCache(self.spec, self.model.layers, NUM_PAGES, BLOCK_SIZE, torch.float32)
        return Executor(self.model, kv)

    async def start(self, transport: TransportChoice, kvcache: KVCacheConfig, num_pages: int) -> None:
        self.prefill_node = self._node("p", transport, kvcache, num_pages)
        self.decode_node = self._node("d", transport, KVCacheConfig(), NUM_PAGES)
        self.prefill = await self.connect(self.prefill_node)
        self.decode = await self.connect(self.decode_node)

    def _node(self, name: str, transport: TransportChoice, kvcache: KVCacheConfig, num_pages: int) -> Node:
        node = Node(self._folder, name, num_pages * (self.layout.block_bytes + 4096 + 256) + 16384, transport)
        self._nodes.callback(node.close)
        node.kvcache, node.ack_timeout_s = kvcache, ACK_TIMEOUT_S
        node.start()
        return node

    async def holder(self, transport: TransportChoice) -> tuple[Node, WorkerClient]:
        """Another instance."""
        node = self._node("h", transport, KVCacheConfig(), NUM_PAGES)
        return node, await self.connect(node)

    async def connect(self, node: Node) -> WorkerClient:
        return await node.connect(fingerprint=FINGERPRINT, layout=self.layout)

    def keys_of(self, prompt: Sequence[int]) -> list[BlockKey]:
        return block_keys(prompt, BLOCK_SIZE, root_key(FINGERPRINT))

    @contextlib.contextmanager
    def client(self, node: Node) -> Iterator[KVCachePool]:
        """Its pool, for any other program."""
        with KVCachePool.connect(f"unix:{node.socket_path}") as pool:
            yield pool

    def put(self, node: Node, keys: Sequence[BlockKey], blocks: Sequence[bytes]) -> None:
        with self.client(node) as pool:
            pool.put(keys, blocks)

    def clear(self, *nodes: Node) -> None:
        """Nothing can be found in their pools."""
        for node in nodes:
            with self.client(node) as pool:
                pool.clear()

    @contextlib.asynccontextmanager
    async def running(self, setting: Setting) -> AsyncIterator[PrefillRunner]:
        """A runner; after it, nothing is held on its device nor in any pool."""

        async def send(message: Prefilled | WorkFailed) -> None:
            self.answers.setdefault(message.ref, []).append(message)
            answered = self._receiving[message.ref].answered
            if not answered.done():  # what was prefilled may still fail to leave
                answered.set_result(message)

        async with asyncio.TaskGroup() as group:
            self.jobs = Jobs(group)
            copies = setting.make_copies(self.executor.kv, self.prefill.segment)
            self.runner = PrefillRunner(
                self.executor,
                self.prefill,
                LayerTransfers(copies, overlap=setting.overlap),
                setting.prefill_chunk,
                send,
                self.jobs,
            )
            loop = group.create_task(self.runner.run())
            yield self.runner
            async with asyncio.timeout(DEADLINE_S):
                while self.jobs.refs:
                    await asyncio.sleep(0.001)
            loop.cancel()
        assert self.executor.kv.num_free_pages == NUM_PAGES
        await self.assert_nothing_is_held(self.prefill)

    async def assert_nothing_is_held(self, pool: WorkerClient) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                stats = await pool.stats(check_integrity=True)
                assert stats.integrity is None
                if not (stats.num_reservations or stats.num_used or stats.num_quarantined):
                    return

    async def order(
        self,
        prompt: Sequence[int],
        source: PrefixSource | None = None,
        time_left_s: float | None = None,
    ) -> Receiving:
        """Reserves at the decode side and gives the order."""
        self._num_prompts += 1
        receiving = Receiving(self, self._num_prompts, prompt)
        self._receiving[receiving.ref] = receiving
        await receiving.begin()
        assert receiving.grant is not None
        self.runner.start(Prefill(receiving.ref, receiving.request, receiving.grant, time_left_s, source))
        return receiving

    async def results(
        self, setting: Setting, prompts: Sequence[Sequence[int]], source: PrefixSource | None = None
    ) -> list[Result]:
        """All prompts at once; the decode side has none of them."""
        self.clear(self.decode_node)
        async with self.running(setting):
            ordered = [await self.order(prompt, source) for prompt in prompts]
            return [await receiving.result() for receiving in ordered]

    def continue_greedily(self, prompt: Sequence[int], first_token: int, pool_pages: list[int]) -> list[int]:
        """The first token and those after it, from the KVCache at the decode side."""
        tokens, kv = [*prompt, first_token], self._decoder.kv
        device_pages = kv.allocate(-(-(len(prompt) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE))
        try:
            view = PoolView(self.decode.segment, self.layout)
            self._decoder.load_blocks(device_pages[: len(pool_pages)], pool_pages, view)
            for _ in range(NUM_OUTPUT_TOKENS - 1):
                chunk = Chunk(tokens[-1:], len(tokens) - 1, device_pages)
                tokens += self._decoder.decode([chunk], [SAMPLING])
        finally:
            kv.free(device_pages)
        return tokens[len(prompt) :]

    def without_rest(self, block: bytes, num_tokens: int) -> bytes:
        """Zeros behind its tokens, where there may be anything."""
        values = np.frombuffer(block, np.float32).reshape(-1, BLOCK_SIZE, self.layout.head_dim).copy()
        values[:, num_tokens:] = 0
        return values.tobytes()


@contextlib.asynccontextmanager
async def prefill_lab(
    model: transformers.PreTrainedModel,
    folder: Path,
    transport: TransportChoice = "auto",
    kvcache: KVCacheConfig | None = None,
    num_pages: int = NUM_PAGES,
) -> AsyncIterator[Lab]:
    """Starts the messengers of both sides; ends them, and all others that the test has started."""
    with contextlib.ExitStack() as nodes:
        lab = Lab(model, folder, nodes)
        await lab.start(transport, kvcache or KVCacheConfig(), num_pages)
        yield lab
        for client in (lab.prefill, lab.decode):
            await client.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """For what another process does and does not announce."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.002)
