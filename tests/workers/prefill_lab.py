"""Prefill alone: a runner on real messengers, a decode side that only receives, holders of prefixes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from kvstore.client.client import KVCachePool
from kvstore.client.worker_client import WorkerClient
from kvstore.pool.segment import Segment
from mooncake.config.sections import KVCacheConfig, TransportChoice
from mooncake.messages.block_orders import BlockOrder
from mooncake.messages.blocks import BlockKey, KVLayout, block_keys, root_key
from mooncake.messages.pools import Capacity, Grant, MessengerAddress, PoolShard, PoolStats, PrefixSource
from mooncake.messages.requests import Ref, Request, SamplingParams
from mooncake.messages.workers import PROTOCOL_VERSION, Prefill, Prefilled, WorkFailed
from mooncake.node.process_config import StageConfig
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, Node
from tests.workers.engine.ranks import ThreadGroup
from tests.workers.followed import FollowedGroup, FollowingRank
from tests.workers.recorded_spans import SPAN, RecordedSpans
from workers.decode.blocks.block_transfers import BlockPair
from workers.engine.batch import Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.tensor_parallel import TensorShard, kv_heads_of
from workers.execution.draws import Draws, Row
from workers.execution.executor import Executor
from workers.execution.jobs import Jobs
from workers.execution.loading import layers_of_stage
from workers.execution.model_spec import model_spec
from workers.groups.next_stage import NextStage
from workers.groups.previous_stage import PreviousStage
from workers.groups.stage_messages import StageHello
from workers.kvcache import prefix_fetch
from workers.kvcache.copies import LayerCopies, copies_for
from workers.kvcache.layerwise import LayerTransfers
from workers.prefill.queue import PrefillQueue
from workers.prefill.runner import PrefillRunner
from workers.prefill.stage import Stage
from workers.prefill.stage_runner import StageRunner

BLOCK_SIZE = 8
FINGERPRINT = "f" * 32
NUM_PAGES = 96
ACK_TIMEOUT_S = 3.0
"""The most seconds for which pages are quarantined for a peer that hangs."""
NUM_OUTPUT_TOKENS = 6
SAMPLING = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0, num_logprobs=1)


@dataclass(frozen=True, slots=True)
class Result:
    """The decode side's result for one prompt: greedy tokens, and the bytes of each block."""

    tokens: list[int]
    blocks: list[bytes]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of the runner.

    `make_copies` is for stage (or rank) number `stage`; others have ordinary copies.
    """

    prefill_chunk: int = 1000
    overlap: bool = True
    make_copies: Callable[[DeviceKVCache, Segment], LayerCopies] = copies_for
    stage: int = 0


@dataclass(slots=True)
class PrefillPart:
    """One stage or rank of the prefill instance: its layers and heads, pool and device."""

    layout: KVLayout
    executor: Executor
    node: Node
    client: WorkerClient


class Receiving:
    """A prompt's pages at the decode side, opened by `grant`."""

    def __init__(self, lab: "Lab", number: int, prompt: Sequence[int], tenant: str = "") -> None:
        self.ref = Ref(1, f"r{number}", 1)
        keys = lab.keys_of(prompt)
        self.request = Request(
            self.ref.request_id, list(prompt), keys, SAMPLING, "front", tenant=tenant, span=SPAN
        )
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
        """Wait until the KVCache has arrived, decode the output, release the pages, and return the result."""
        async with asyncio.timeout(DEADLINE_S):
            answer = await self.answered
            assert isinstance(answer, Prefilled), answer
            await self._lab.decode.wait_arrived(self.reservation.reservation_id)
        pages = [block.page for block in self.reservation.blocks]
        blocks = [bytes(self._lab.decode.segment.page_view(page)) for page in pages]
        num_in_last = len(self.request.token_ids) % BLOCK_SIZE
        if num_in_last:
            blocks[-1] = self._lab.without_rest(blocks[-1], num_in_last)
        assert answer.first_logprobs is not None
        assert answer.first_logprobs.top_token_ids == [answer.first_token]
        tokens = self._lab.continue_greedily(self.request.token_ids, answer.first_token, pages)
        await self.release()
        return Result(tokens, blocks, answer.num_cached_tokens)


class Lab:
    """A prefill instance and its peers. `prefill_lab` makes it."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        folder: Path,
        nodes: contextlib.ExitStack,
        num_device_pages: int,
        layer_window: int | None,
    ) -> None:
        self.spec = model_spec(model.config.to_dict())
        self._hf_model = model
        self.layout = KVLayout(
            self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, BLOCK_SIZE, "float32"
        )
        self._folder, self._nodes, self._num_device_pages = folder, nodes, num_device_pages
        self._layer_window = layer_window
        self._decoder = self._executor(self.layout)
        self._layout_of: dict[Node, KVLayout] = {}
        self.parts: list[PrefillPart] = []
        self._num_prompts = self._num_links = 0
        self.num_taken_pages = 0
        """The number of device pages of each stage that the test has allocated."""
        self._receiving: dict[Ref, Receiving] = {}
        self.answers: dict[Ref, list[Prefilled | WorkFailed]] = {}
        self.spans = RecordedSpans()
        """The spans of all stages. Those of followers are not recorded."""
        self.runner: PrefillRunner
        self.stages: list[Stage] = []
        """The stages or ranks of the runner."""

    @property
    def prefill_nodes(self) -> list[Node]:
        return [part.node for part in self.parts]

    @property
    def prefill_node(self) -> Node:
        """The messenger of the first stage."""
        return self.parts[0].node

    @property
    def prefill(self) -> WorkerClient:
        """The pool client of the first stage."""
        return self.parts[0].client

    @property
    def executor(self) -> Executor:
        """The executor of the first stage."""
        return self.parts[0].executor

    def _executor(
        self, layout: KVLayout, shard: TensorShard | None = None, window: int | None = None
    ) -> Executor:
        model = DecoderModel(self.spec, layout.layers, torch.float32, shard=shard)
        model.load_weights(self._hf_model.state_dict().items())
        kv = DeviceKVCache(
            self.spec,
            layout.layers,
            self._num_device_pages,
            BLOCK_SIZE,
            torch.float32,
            kv_heads=model.kv_heads,
            window=window,
        )
        return Executor(model, kv)

    async def start(
        self,
        transport: TransportChoice,
        kvcache: KVCacheConfig,
        num_pages: int,
        num_stages: int,
        num_ranks: int,
    ) -> None:
        self.decode_node = self._node("d", transport, KVCacheConfig(), self._num_device_pages, self.layout)
        self.decode = await self.connect(self.decode_node)
        self._num_ranks = num_ranks
        if num_ranks > 1:
            for number, shard in enumerate(ThreadGroup(num_ranks).shards):
                layout = self.layout.of_heads(kv_heads_of(self.spec, number, num_ranks))
                node = self._node(f"p.{number}", transport, kvcache, num_pages, layout)
                executor = self._executor(layout, shard, self._layer_window)
                self.parts.append(PrefillPart(layout, executor, node, await self.connect(node)))
            return
        for number in range(num_stages):
            stage = StageConfig(number=number, num_stages=num_stages)
            layout = self.layout.of_layers(layers_of_stage(self.spec.num_layers, stage))
            node = self._node(stage.part_of("p"), transport, kvcache, num_pages, layout)
            client = await self.connect(node)
            executor = self._executor(layout, window=self._layer_window)
            self.parts.append(PrefillPart(layout, executor, node, client))

    def _node(
        self,
        name: str,
        transport: TransportChoice,
        kvcache: KVCacheConfig,
        num_pages: int,
        layout: KVLayout,
    ) -> Node:
        node = Node(self._folder, name, num_pages * (layout.block_bytes + 4096 + 256) + 16384, transport)
        self._nodes.callback(node.close)
        self._layout_of[node] = layout
        node.kvcache, node.ack_timeout_s = kvcache, ACK_TIMEOUT_S
        node.start()
        return node

    async def holder(self, transport: TransportChoice) -> tuple[Node, WorkerClient]:
        """Start another instance's messenger, and return it with a pool client."""
        node = self._node("h", transport, KVCacheConfig(), NUM_PAGES, self.layout)
        return node, await self.connect(node)

    async def connect(self, node: Node) -> WorkerClient:
        return await node.connect(fingerprint=FINGERPRINT, layout=self._layout_of[node])

    def keys_of(self, prompt: Sequence[int]) -> list[BlockKey]:
        return block_keys(prompt, BLOCK_SIZE, root_key(FINGERPRINT))

    @contextlib.contextmanager
    def client(self, node: Node) -> Iterator[KVCachePool]:
        """Make a context with a client of a pool, as any other program would have it."""
        with KVCachePool.connect(f"unix:{node.socket_path}") as pool:
            yield pool

    def put(self, node: Node, keys: Sequence[BlockKey], blocks: Sequence[bytes]) -> None:
        """Store the layers and heads of these blocks that belong to the pool of `node`."""
        with self.client(node) as pool:
            pool.put(keys, [self.part_of(block, self._layout_of[node]) for block in blocks])

    def part_of(self, block: bytes, layout: KVLayout) -> bytes:
        """Return the layers and heads of `layout` from a whole block."""
        shape = self.layout.num_layers, self.layout.num_kv_heads, self.layout.head_bytes
        whole = np.frombuffer(block, np.uint8).reshape(shape)
        layers, heads = layout.layers, layout.heads
        return whole[layers.start : layers.stop, heads.start : heads.stop].tobytes()

    def put_local(self, keys: Sequence[BlockKey], blocks: Sequence[bytes]) -> None:
        """Store these blocks in the pools of all stages or ranks of the prefill instance."""
        for node in self.prefill_nodes:
            self.put(node, keys, blocks)

    def clear(self, *nodes: Node) -> None:
        """Remove all blocks from these pools."""
        for node in nodes:
            with self.client(node) as pool:
                pool.clear()

    @contextlib.asynccontextmanager
    async def running(self, setting: Setting) -> AsyncIterator[PrefillRunner]:
        """Make a context with a runner. At its end nothing may be held on its device or in any pool."""

        async def send(message: Prefilled | WorkFailed) -> None:
            self.answers.setdefault(message.ref, []).append(message)
            answered = self._receiving[message.ref].answered
            if not answered.done():  # what was prefilled may still fail to leave
                answered.set_result(message)

        async with asyncio.TaskGroup() as group:
            self.jobs = Jobs(group)
            ranks = self._ranks(setting) if self._num_ranks > 1 else None
            links = [self._next_stage(number) for number in range(len(self.parts) - 1)] if not ranks else []
            stages = []
            for number, link in enumerate([*links, None]):
                part, transfers = self.parts[number], self._transfers(setting, number)
                followers = ranks.followers if ranks else None
                stages.append(Stage(part.executor, part.client, transfers, link, followers, self.spans))  # type: ignore[arg-type]
            multiple = BLOCK_SIZE if self._layer_window else 1
            queue = PrefillQueue(setting.prefill_chunk, multiple=multiple, block_size=BLOCK_SIZE)
            self.runner = PrefillRunner(stages[0], queue, send, self.jobs, lambda: "", lambda: None)
            running = [group.create_task(self.runner.run())]
            hear, befores = self.runner.hear, []
            for link, stage in zip(links, stages[1:], strict=True):
                before = self._previous_stage(link)
                befores.append(before)
                running.append(group.create_task(before.beat()))
                await asyncio.gather(link.join(), before.join())
                follower = StageRunner(stage, before, group)
                running += [
                    group.create_task(work)
                    for work in (follower.run(), before.run(follower.obey, _nothing_is_pinned))
                ]
                running += [group.create_task(work) for work in (link.run(hear), link.beat())]
                hear = follower.hear
            if ranks:
                await ranks.start(group, hear)
                stages += ranks.stages
            self.stages = stages
            yield self.runner
            async with asyncio.timeout(DEADLINE_S):
                while any(stage.jobs for stage in stages) or self.jobs.refs:
                    await asyncio.sleep(0.001)
            for task in running:
                task.cancel()
            if ranks:
                ranks.stop()
        if ranks:
            ranks.close()
        for before in befores:
            before.close(linger_s=0)
        for link in links:
            link.close()
        for part in self.parts:
            assert part.executor.kv.pages.num_free == part.executor.kv.pages.num_pages - self.num_taken_pages
            await self.assert_nothing_is_held(part.client)

    def _copies(self, setting: Setting, number: int) -> LayerCopies:
        make_copies = setting.make_copies if number == setting.stage else copies_for
        return make_copies(self.parts[number].executor.kv, self.parts[number].client.segment)

    def _transfers(self, setting: Setting, number: int) -> LayerTransfers:
        window = self.parts[number].executor.kv.window
        return LayerTransfers(self._copies(setting, number), overlap=setting.overlap, window=window)

    def _ranks(self, setting: Setting) -> FollowedGroup:
        ranks = [
            FollowingRank(part.executor, part.client, self._copies(setting, number), setting.overlap)
            for number, part in enumerate(self.parts[1:], start=1)
        ]
        return FollowedGroup(self._folder, FINGERPRINT, ranks)

    def _next_stage(self, number: int) -> NextStage:
        self._num_links += 1
        return NextStage(
            f"ipc://{self._folder}/stage-{self._num_links}",
            CLUSTER_KEY,
            stage=number + 1,
            num_stages=len(self.parts),
            fingerprint=FINGERPRINT,
            timeout_s=DEADLINE_S,
        )

    def _previous_stage(self, link: NextStage) -> PreviousStage:
        capacity = Capacity(NUM_PAGES, NUM_PAGES, 8)
        hello = StageHello(PROTOCOL_VERSION, link.stage, len(self.parts), FINGERPRINT, capacity, "cpu", ())

        async def pools() -> dict[str, PoolStats]:
            return {}

        return PreviousStage(link.endpoint, b"stage#1", CLUSTER_KEY, hello, pools, DEADLINE_S)

    def computed_layers(self) -> list[int]:
        """Return a list to which each layer is added when a stage computes it, from now on."""
        computed: list[int] = []
        for part in self.parts:
            forward = part.executor.model.forward_layer

            def noted(layer: int, *rest: Any, forward: Callable[..., torch.Tensor] = forward) -> torch.Tensor:
                computed.append(layer)
                return forward(layer, *rest)

            part.executor.model.forward_layer = noted  # type: ignore[method-assign]
        return computed

    async def assert_nothing_is_held(self, pool: WorkerClient) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                stats = await pool.stats(check_integrity=True)
                assert stats.integrity is None
                if not (stats.num_reservations or stats.num_used or stats.num_quarantined):
                    return

    def source(self, holder: MessengerAddress, num_blocks: int) -> PrefixSource:
        """Return the prefix source of an order: a pool that is expected to have `num_blocks` blocks."""
        return PrefixSource((PoolShard(holder, self.layout),), num_blocks)

    async def order(
        self,
        prompt: Sequence[int],
        source: PrefixSource | None = None,
        time_left_s: float | None = None,
        tenant: str = "",
    ) -> Receiving:
        """Reserve a prompt's pages at the decode side, and order its prefill."""
        self._num_prompts += 1
        receiving = Receiving(self, self._num_prompts, prompt, tenant)
        self._receiving[receiving.ref] = receiving
        await receiving.begin()
        assert receiving.grant is not None
        self.runner.start(Prefill(receiving.ref, receiving.request, receiving.grant, time_left_s, source))
        return receiving

    async def results(
        self, setting: Setting, prompts: Sequence[Sequence[int]], source: PrefixSource | None = None
    ) -> list[Result]:
        """Prefill all prompts at the same time, and return the results.

        The decode side has none of their blocks.
        """
        self.clear(self.decode_node)
        async with self.running(setting):
            ordered = [await self.order(prompt, source) for prompt in prompts]
            return [await receiving.result() for receiving in ordered]

    def plain(self, prompt: Sequence[int]) -> Result:
        """Return the result that every kind of prefill must give.

        It is computed whole, by one model, without pools.
        """
        tokens, kv, model = list(prompt), self._decoder.kv, self._decoder.model
        num_blocks = -(-len(prompt) // BLOCK_SIZE)
        pages = kv.pages.allocate(-(-(len(prompt) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE))
        try:
            batch = self._decoder.prepare([Chunk(tokens, 0, pages)])
            hidden = model.embed(batch)
            for layer in kv.layers:
                hidden = model.forward_layer(layer, hidden, batch, kv)
            blocks = [
                b"".join(kv.layer(layer)[page].numpy().tobytes() for layer in kv.layers)
                for page in pages[:num_blocks]
            ]
            drawn = Draws([Row(SAMPLING, len(tokens))]).draw(model.logits(hidden[-1:]))
            answer = self._continue(tokens + drawn.tokens, pages)
        finally:
            kv.pages.free(pages)
        if len(prompt) % BLOCK_SIZE:
            blocks[-1] = self.without_rest(blocks[-1], len(prompt) % BLOCK_SIZE)
        return Result(answer[len(prompt) :], blocks, 0)

    def continue_greedily(self, prompt: Sequence[int], first_token: int, pool_pages: list[int]) -> list[int]:
        """Return the output tokens, the first one included, decoded from the KVCache at the decode side."""
        kv = self._decoder.kv
        device_pages = kv.pages.allocate(-(-(len(prompt) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE))
        try:
            copies = copies_for(kv, self.decode.segment)
            pairs = [BlockPair(*pages) for pages in zip(device_pages, pool_pages, strict=False)]
            for layer in kv.layers:
                assert not copies.load(layer, pairs, None).damaged
            return self._continue([*prompt, first_token], device_pages)[len(prompt) :]
        finally:
            kv.pages.free(device_pages)

    def _continue(self, tokens: list[int], device_pages: list[int]) -> list[int]:
        """Return all output tokens. `tokens` are the prompt and the first token, which has no KVCache yet."""
        for _ in range(NUM_OUTPUT_TOKENS - 1):
            batch = self._decoder.prepare([Chunk(tokens[-1:], len(tokens) - 1, device_pages)])
            tokens = tokens + self._decoder.decode(batch, Draws([Row(SAMPLING, len(tokens))])).tokens
        return tokens

    def without_rest(self, block: bytes, num_tokens: int) -> bytes:
        """Return a block with zeros behind its tokens, where any bytes may be."""
        values = np.frombuffer(block, np.float32).reshape(-1, BLOCK_SIZE, self.layout.head_dim).copy()
        values[:, num_tokens:] = 0
        return values.tobytes()


@contextlib.contextmanager
def endless_patience() -> Iterator[None]:
    """Make a context in which holders of prefixes are never given up, however slow the machine is."""
    with mock.patch.object(prefix_fetch, "time", SimpleNamespace(monotonic=lambda: 0.0)):
        yield


@contextlib.asynccontextmanager
async def prefill_lab(
    model: transformers.PreTrainedModel,
    folder: Path,
    transport: TransportChoice = "auto",
    kvcache: KVCacheConfig | None = None,
    num_pages: int = NUM_PAGES,
    num_stages: int = 1,
    num_ranks: int = 1,
    num_device_pages: int = NUM_PAGES,
    layer_window: int | None = None,
) -> AsyncIterator[Lab]:
    """Make a context with the messengers of both sides. All messengers that the test starts end with it."""
    with contextlib.ExitStack() as nodes:
        lab = Lab(model, folder, nodes, num_device_pages, layer_window)
        await lab.start(transport, kvcache or KVCacheConfig(), num_pages, num_stages, num_ranks)
        yield lab
        for client in (*(part.client for part in lab.parts), lab.decode):
            await client.close()


StartLab = Callable[..., contextlib.AbstractAsyncContextManager[Lab]]
"""The type of a function that makes a `prefill_lab` of some model in some folder."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` is true, for a state that another process reaches without a message."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.002)


def _nothing_is_pinned(order: BlockOrder) -> None:
    raise AssertionError(f"nobody has asked for {order}")
