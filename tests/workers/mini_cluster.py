"""A cluster without ZeroMQ and HTTP, with the real policy, runners, engine and messenger processes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import transformers

from conductor.effects import Effect
from conductor.front.generation.reception import Reception
from conductor.policy import Conductor
from conductor.settings import Limits
from kvstore.client.worker_client import WorkerClient
from kvstore.pool.segment import Segment
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.blocks import KVDtype, KVLayout, block_keys, root_key
from mooncake.messages.fronts import (
    Cancel,
    Continue,
    Failed,
    FrontHello,
    Interrupted,
    Rejected,
    Submit,
    TokenOutput,
)
from mooncake.messages.migration import HandOver, PreCopy, Prepare, TakeOver
from mooncake.messages.pools import Capacity, PoolShard
from mooncake.messages.requests import Request, SamplingParams, TokenLogprobs
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    Decode,
    FromWorker,
    Prefill,
    Register,
    Reserve,
    Role,
    ToWorker,
    WorkFailed,
)
from mooncake.model.grammar import Grammars, Vocabulary
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S, Node
from tests.tiny_tokenizer import IM_END_ID, tiny_backend
from tests.workers.engine.ranks import ThreadGroup
from tests.workers.followed import FollowedGroup, FollowingRank
from tests.workers.recorded_spans import SPAN, RecordedSpans
from workers.decode.blocks.block_transfers import BlockTransfers
from workers.decode.runner import DecodeRunner
from workers.decode.tbt_slo.prompt_budget import ChunkLimits
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.tensor_parallel import TensorShard, kv_heads_of
from workers.execution.executor import Executor
from workers.execution.jobs import Jobs
from workers.execution.loading import TORCH_DTYPES
from workers.execution.model_spec import model_spec
from workers.kvcache.copies import LayerCopies, copies_for
from workers.kvcache.layerwise import LayerTransfers
from workers.modules.helper_link import HelperAccess
from workers.prefill.queue import PrefillQueue
from workers.prefill.runner import PrefillRunner
from workers.prefill.stage import Stage

BLOCK_SIZE = 8
FINGERPRINT = "f" * 32
FRONT = b"front#1"
MakeCopies = Callable[[DeviceKVCache, Segment], LayerCopies]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of pages of each instance, and settings of its computation."""

    num_pool_pages: int = 64
    num_device_pages: int = 64
    num_prefill_pages: int | None = None
    """The number of device pages of the prefill instance; None for as many as other instances have."""
    prefill_chunk: int = 20
    saturating_tokens: int | None = None
    """The number of tokens with which a prefill pass is at full speed; None for `prefill_chunk`."""
    layerwise_overlap: bool = True
    max_batch: int = 8
    block_size: int = BLOCK_SIZE
    num_decode: int = 1
    inline: bool = False
    """Whether decode instances compute all prompts. Then no prefill instance registers."""
    mixed_chunk_tokens: int = 16
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    lost_after: tuple[int, ...] = ()
    """Numbers of tokens after which a request loses its decode instance."""
    num_ranks: int = 1
    """The number of ranks of every instance."""
    idle_cores: frozenset[int] = frozenset()
    """The idle cores that all instances share."""
    dtype: KVDtype = "float32"


@dataclass(slots=True)
class Answer:
    """The answer to one request, as a front would have received it."""

    reception: Reception
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int | None = None
    error: str | None = None
    param: str | None = None
    """The field at fault, if the request was refused."""
    num_lost: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        return self.reception.token_ids


async def tokens_of(answer: Answer) -> list[int]:
    """Wait for the end of an answer, which must not be an error, and return its tokens."""
    await answer.ended.wait()
    assert answer.error is None
    return answer.tokens


class InstanceUnderTest:
    """A worker without its connections, and its other ranks if it has some. Each rank has a pool."""

    def __init__(self, cluster: "MiniCluster", name: str, role: Role, pools: list[WorkerClient]) -> None:
        sizes = cluster.sizes
        self.identity = peer_identity(name, 1)
        self.pools = pools
        self.decoding: asyncio.Task[None] | None = None
        executors = cluster.executors(role)
        self.executor, pool, kv = executors[0], pools[0], executors[0].kv
        self.ranks: FollowedGroup | None = None
        if len(pools) > 1:
            others = zip(executors[1:], pools[1:], strict=True)
            self.ranks = FollowedGroup(
                cluster.folder, FINGERPRINT, [FollowingRank(*other) for other in others]
            )
        followers = self.ranks.followers if self.ranks else None
        self.prefill_jobs, self.decode_jobs = Jobs(cluster.group), Jobs(cluster.group)

        async def send(message: FromWorker) -> None:
            cluster.hear(self, message)

        transfers = LayerTransfers(cluster.copies(kv, pool.segment), overlap=sizes.layerwise_overlap)
        stage = Stage(self.executor, pool, transfers, followers=followers, tracer=cluster.spans)  # type: ignore[arg-type]
        queue = PrefillQueue(
            sizes.prefill_chunk, saturating_tokens=sizes.saturating_tokens, block_size=sizes.block_size
        )
        self.prefill = PrefillRunner(
            stage,
            queue,
            send,
            self.prefill_jobs,
            lambda: self.decode.why_no_prompts,
            lambda: self.decode.helper_lost(),
        )
        self.decode = DecodeRunner(
            self.executor,
            pool,
            BlockTransfers(cluster.decode_copies(kv, pool.segment), kv),
            sizes.max_batch,
            ChunkLimits(sizes.block_size, sizes.mixed_chunk_tokens, sizes.prefill_chunk),
            DEADLINE_S,
            send,
            cluster.receive,
            self.decode_jobs,
            FINGERPRINT,
            HelperAccess(CLUSTER_KEY, DEADLINE_S),
            cluster.beat,
            self.prefill,
            lambda: role is Role.PREFILL,
            followers,
            cluster.spans,  # type: ignore[arg-type]
        )
        self.registration = Register(
            PROTOCOL_VERSION,
            name,
            1,
            role,
            FINGERPRINT,
            cluster.layout,
            tuple(PoolShard(pool.address, pool.segment.layout) for pool in pools),
            Capacity(min(pool.num_pages for pool in pools), kv.pages.num_pages, sizes.max_batch),
            self.executor.engine,
            sizes.idle_cores,
        )

    def obey(self, message: ToWorker) -> None:
        match message:
            case Prefill():
                self.prefill.start(message)
            case Reserve():
                self.decode.reserve(message)
            case Decode():
                self.decode.decode(message)
            case PreCopy() | Prepare() | HandOver() | TakeOver():
                self.decode.migrate(message)
            case Abort(ref=ref):
                self.prefill_jobs.cancel(ref)
                self.decode_jobs.cancel(ref)

    @property
    def pool(self) -> WorkerClient:
        """The pool of the first rank."""
        return self.pools[0]

    @property
    def is_busy(self) -> bool:
        return bool(self.prefill_jobs.refs or self.decode_jobs.refs)


class MiniCluster:
    """A cluster of one prefill instance and one or more decode instances.

    Tests `submit` and `cancel` requests, and can read all of its state.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        sizes: Sizes,
        folder: Path,
        group: asyncio.TaskGroup,
        decode_copies: MakeCopies,
    ) -> None:
        self.sizes, self.folder, self.group = sizes, folder, group
        self.copies, self.decode_copies = copies_for, decode_copies
        self.spec = model_spec(model.config.to_dict())
        self._weights = model.state_dict()
        self.model = self._loaded(None)
        self.layout = KVLayout(
            self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, sizes.block_size, sizes.dtype
        )
        self.grammars = Grammars(lambda: Vocabulary(tiny_backend(), (IM_END_ID,), self.spec.vocab_size))
        limits = Limits(
            max_running_requests=4096,
            peer_timeout_s=3600,
            ttft_slo_s=sizes.ttft_slo_s,
            tbt_slo_s=sizes.tbt_slo_s,
        )
        self.conductor = Conductor(1, FINGERPRINT, limits)
        self.spans = RecordedSpans()
        self.instances: list[InstanceUnderTest] = []
        self.num_beats = 0
        self.nodes: dict[str, Node] = {}
        """The messengers by name."""
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, FINGERPRINT), time.monotonic())

    def _loaded(self, shard: TensorShard | None) -> DecoderModel:
        dtype = TORCH_DTYPES[self.sizes.dtype]
        model = DecoderModel(self.spec, range(self.spec.num_layers), dtype, shard=shard)
        model.load_weights(self._weights.items())
        return model

    def executors(self, role: Role) -> list[Executor]:
        """Return the executors of an instance, one for each rank."""
        sizes, models = self.sizes, [self._loaded(None)]
        num_pages = sizes.num_device_pages
        if role is Role.PREFILL and sizes.num_prefill_pages is not None:
            num_pages = sizes.num_prefill_pages
        if sizes.num_ranks > 1:
            models = [self._loaded(shard) for shard in ThreadGroup(sizes.num_ranks).shards]
        return [
            Executor(
                model,
                DeviceKVCache(
                    self.spec,
                    model.layers,
                    num_pages,
                    sizes.block_size,
                    model.dtype,
                    kv_heads=model.kv_heads,
                ),
                self.grammars,
                refill=lambda weights: weights.load(self._weights.items()),
            )
            for model in models
        ]

    def layouts(self) -> list[KVLayout]:
        """The layouts of the shards of an instance, one for each rank."""
        num_ranks = self.sizes.num_ranks
        return [self.layout.of_heads(kv_heads_of(self.spec, rank, num_ranks)) for rank in range(num_ranks)]

    def hear(self, instance: InstanceUnderTest, message: FromWorker) -> None:
        """Deliver a message from an instance to the Conductor."""
        self.take(self.conductor.handle(instance.identity, message, time.monotonic()))

    def take(self, effects: list[Effect]) -> None:
        """Deliver messages of the Conductor at once."""
        for effect in effects:
            if isinstance(effect.message, Failed | Rejected):
                answer = self.answers[effect.message.request_id]
                answer.error = effect.message.message
                if isinstance(effect.message, Failed) and effect.message.is_refused:
                    answer.param = effect.message.param
                answer.ended.set()
            if isinstance(effect.message, Interrupted):
                request_id = effect.message.request_id
                output = list(self.answers[request_id].tokens)
                request = self.requests[request_id].continued(output, self.sizes.block_size)
                self.take(self.conductor.handle(FRONT, Continue(request), time.monotonic()))
            for instance in self.instances:
                if instance.identity == effect.peer:
                    instance.obey(effect.message)  # type: ignore[arg-type]

    async def beat(self) -> None:
        """Count a heartbeat that is sent out of turn. It is delivered to no one here."""
        self.num_beats += 1

    async def receive(self, outputs: list[tuple[str, TokenOutput]]) -> None:
        """Receive tokens as the front does.

        Another attempt may draw tokens again that were received before.
        """
        for _, output in outputs:
            answer = self.answers[output.ref.request_id]
            num_before = len(answer.tokens)
            new = answer.reception.accept(output)
            if new is None:
                continue
            assert output.position == num_before or output.ref.attempt > 1
            if new:
                answer.logprobs += output.logprobs
            answer.num_cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None:
                answer.ended.set()
            elif len(answer.tokens) in self.sizes.lost_after and answer.num_lost < output.ref.attempt:
                answer.num_lost = output.ref.attempt
                lost = WorkFailed(output.ref, "lost", retryable=True)
                self.take(self.conductor.handle(self.instances[-1].identity, lost, time.monotonic()))

    def submit(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, salt: str = "", tenant: str = ""
    ) -> Answer:
        """Start a request, and return its answer, which is not complete yet."""
        root = root_key(FINGERPRINT, salt)
        keys = block_keys(prompt, self.sizes.block_size, root)
        request = Request(
            request_id, prompt, keys, sampling, "front", bool(salt), root, tenant=tenant, span=SPAN
        )
        answer = self.answers[request_id] = Answer(Reception(request, lambda _: None, 0.0))
        self.requests[request_id] = request
        self.take(self.conductor.handle(FRONT, Submit(request), time.monotonic()))
        return answer

    def cancel(self, request_id: str) -> None:
        """Cancel a request, as if its client had gone."""
        self.take(self.conductor.handle(FRONT, Cancel(request_id), time.monotonic()))

    async def idle(self) -> None:
        """Wait until no instance has work. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while self.conductor.num_open or any(instance.is_busy for instance in self.instances):
                await asyncio.sleep(0.002)

    async def assert_nothing_is_held(self) -> None:
        """Check that every page of every device and pool is free or evictable."""
        await self.idle()
        for instance in self.instances:
            kv = instance.executor.kv
            for pool in instance.pools:
                stats = await pool.stats(check_integrity=True)
                async with asyncio.timeout(DEADLINE_S):
                    # The batch lets go of aborted sequences in its next round.
                    while kv.pages.num_free < kv.pages.num_pages or stats.num_used:
                        await asyncio.sleep(0.002)
                        stats = await pool.stats(check_integrity=True)
                assert stats.num_reservations == 0
                assert stats.integrity is None
            if instance.ranks is not None:
                assert not any(stage.jobs for stage in instance.ranks.stages)
                assert all(held.is_empty for held in instance.ranks.held)


Cluster = TypeVar("Cluster", bound=MiniCluster)


@contextlib.asynccontextmanager
async def mini_cluster(
    model: transformers.PreTrainedModel,
    folder: Path,
    sizes: Sizes | None = None,
    decode_copies: MakeCopies = copies_for,
    timeout_s: float = 6 * DEADLINE_S,
    make: type[Cluster] = MiniCluster,
) -> AsyncIterator[Cluster]:
    """Make a context with a cluster: its messengers and runners."""
    sizes = sizes or Sizes()
    with contextlib.ExitStack() as nodes:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            cluster = make(model, sizes, folder, group, decode_copies)
            loops = []
            role = Role.BOTH if sizes.inline else Role.DECODE
            decodes = [(f"d{number}", role) for number in range(sizes.num_decode)]
            for name, role in (("p0", Role.PREFILL), *decodes):
                pools = []
                for rank, layout in enumerate(cluster.layouts()):
                    stride = -(-layout.block_bytes // 4096) * 4096
                    segment_bytes = sizes.num_pool_pages * (stride + 256) + 16384
                    node = Node(folder, f"{name}.{rank}" if rank else name, segment_bytes, "auto")
                    nodes.callback(node.close)
                    cluster.nodes[node.name] = node
                    node.start()
                    pools.append(await node.connect(fingerprint=FINGERPRINT, layout=layout))
                instance = InstanceUnderTest(cluster, name, role, pools)
                if instance.ranks is not None:
                    await instance.ranks.start(group, instance.prefill.hear)
                cluster.instances.append(instance)
                if role is not Role.PREFILL or not sizes.inline:
                    cluster.conductor.handle(instance.identity, instance.registration, time.monotonic())
                instance.decoding = group.create_task(instance.decode.run())
                loops += [group.create_task(instance.prefill.run()), instance.decoding]
            yield cluster
            for loop in loops:
                loop.cancel()
            for instance in cluster.instances:
                if instance.ranks is not None:
                    instance.ranks.stop()
                for pool in instance.pools:
                    await pool.close()
        for instance in cluster.instances:
            if instance.ranks is not None:
                instance.ranks.close()


StartCluster = Callable[..., contextlib.AbstractAsyncContextManager[MiniCluster]]
"""The type of a function that makes a `mini_cluster` of some model in some folder."""
